"""What is optimised: pure functions on tensors, one equation a function.

Shapes, everywhere in this package: B sequences, G completions of a prompt, C completion tokens, S positions, T loops,
H hidden, V vocabulary. Sources: Williams & Tureci, arXiv 2602.10520 (RLTT); Closing the Loop, arXiv 2610.00673.

    loss = reduce_ij( Σ_t ω^(t)_ij · term^(t)_ij ) + β · reduce_ij( k3(ℓ_ref^(T) - ℓ^(T)) )

credit.py       ω      which loop gets how much of the policy gradient
advantage.py    A      rewards against their group
policy_loss.py  term   REINFORCE and the ratio forms, each loop on its own, and the reductions
kl.py           k3     the last loop against a frozen reference
logprobs.py     ℓ      log-probs of every loop without T·S·V logits
looplm.py              the pretraining objective: Σ_t p_t·CE_t + β·KL(p ‖ uniform)
"""
