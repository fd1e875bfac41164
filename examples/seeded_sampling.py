"""The same seed gives the same tokens with every method; another seed gives others."""

from typing import Any

import dominotree as dt

PROMPT = "Write the first sentence of a story."
WAYS: dict[str, dict[str, Any]] = {
    "domino": {"method": "domino"},
    "marginal, 4 nodes": {"method": "marginal", "budget": 4},
    "dominotree, 12 nodes": {"method": "dominotree", "budget": 12},
    "dominotree, noise-aware": {"method": "dominotree", "budget": 12, "noise_aware": True},
}


def main() -> None:
    """Samples from two seeds with several methods."""
    pair = dt.load("smollm2-135m", dtype="float32")
    for seed in (1, 2):
        sampling = dt.SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_new_tokens=32)
        plain = pair.generate(PROMPT, sampling=sampling, method="ar")
        print(f"seed {seed}: {plain.text!r}")
        for name, options in WAYS.items():
            answer = pair.generate(PROMPT, sampling=sampling, **options)
            same = "same" if answer.token_ids == plain.token_ids else "OTHER"
            print(f"  {name:<24}{answer.stats.mean_accepted:5.2f} tokens a pass, {same} tokens")


if __name__ == "__main__":
    main()
