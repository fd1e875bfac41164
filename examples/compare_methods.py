"""Tau and speed of every method with a fixed budget, on a few prompts. Every answer must be plain decoding's.

For numbers to rely on use `dominotree bench`: more prompts, methods in changing order, intervals.
"""

import statistics

import dominotree as dt

PROMPTS = ("Why is the sky blue?", "Write a Python function that reverses a list.", "What is 12 times 7?")


def main() -> None:
    """Prints a row a method."""
    pair = dt.load("smollm2-135m")
    pair.generate(PROMPTS[0], max_new_tokens=8)  # the first passes are slower
    plain: list[list[int]] = []
    print(f"{'method':<12}{'tau':>6}{'tokens/s':>10}{'identical':>11}")
    for name, method in dt.METHODS.items():
        if method.rule != "fixed":
            continue  # cost-aware methods need `dominotree profile` first
        outputs = [pair.generate(prompt, method=name, max_new_tokens=32) for prompt in PROMPTS]
        tokens = [output.token_ids for output in outputs]
        plain = plain or tokens  # ar is the first method
        tau = statistics.mean(output.stats.mean_accepted for output in outputs)
        speed = statistics.mean(output.stats.tokens_per_s for output in outputs)
        same = "-" if name == "ar" else "yes" if tokens == plain else "no"
        print(f"{name:<12}{tau:>6.2f}{speed:>10.1f}{same:>11}")


if __name__ == "__main__":
    main()
