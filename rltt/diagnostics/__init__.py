"""What each loop does: the per-loop measures of LoopCoder-v2 (arXiv 2606.18023, section 3.2), in bounded memory.

hidden.py       how the state moves: step size, alignment, effective rank, fixed-point gap, offset cost
attention.py    where a loop looks: entropy, change between loops, diversity of heads
outputs.py      what a loop predicts: rank of the true token, change between loops, entropy
forward.py      runs a looped model and hands over its states and its attention, layer by layer
measures.py     all measures of one sequence, and of many
recommend.py    what they say about the number of loops
texts.py        held-out text in
report.py       what is written and printed of them
plots.py        what is drawn of them
diagnose.py     the work of `rltt diagnose`

Shapes: S positions, R loops, H hidden, V vocabulary, L layers, N heads, M key-value heads, D channels of a head, Q
queries, K keys. Loops are counted from 1; h^(0) are the token embeddings. Logarithms are natural.
"""
