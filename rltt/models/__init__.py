"""Looped policies as transformers models.

spec.py           LoopSpec: what a looped model does, for every other part
configuration.py  the configurations, without torch
looped.py         the loop itself, shared by all families
exit_gate.py      exit probabilities and the Q-exit
norm.py           the norm between layers and loops
looplm.py         LoopLM / Ouro
looped_dense.py   Llama and Qwen3 decoders run T times
plt.py            Parallel Loop Transformers: LoopCoder-V2, IQuest-Coder-Loop
plt_attention.py  their attention: loop 1's keys and values for all loops, gated against a window
plt_cache.py      their cache
convert.py        dense checkpoints into looped ones
load.py           a recipe's policy, and its tokenizer
"""
