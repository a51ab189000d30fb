"""Looped policies as transformers models.

spec.py           LoopSpec: what a looped model does, for every other part
configuration.py  the configurations, without torch
looped.py         the loop itself, shared by all families
exit_gate.py      exit probabilities and the Q-exit
looplm.py         LoopLM / Ouro
looped_dense.py   Llama and Qwen3 decoders run T times
convert.py        dense checkpoints into looped ones
load.py           a recipe's policy, and its tokenizer
"""
