"""`rltt probe`: what a run would have to learn from, measured before it.

solve_rates.py     samples training prompts through the trainer
results.py         what was found of each prompt, kept for later
report.py          how often prompts are solved, how many groups would be mixed, what to change
filter.py          `data.filter`: training on the prompts that are solved neither always nor never
learning_rates.py  a few updates at each of several learning rates
rate_report.py     where these lead, and which rate is recommended
start.py           the policy that RL would start from
"""
