"""One answer, a batch of answers, and what they cost."""

import dominotree as dt


def main() -> None:
    """Decodes a question, then three together."""
    pair = dt.load("smollm2-135m")
    answer = pair.generate("Why is the sky blue?", max_new_tokens=64)
    stats = answer.stats
    print(answer.text)
    print(f"{stats.new_tokens} tokens, {stats.rounds} passes, {stats.mean_accepted:.2f} tokens a pass, ", end="")
    print(f"{stats.tokens_per_s:.1f} tokens/s, ended by {answer.finish_reason}\n")

    questions = ["Name a fruit.", "Name a river.", "Name a planet."]
    for question, reply in zip(questions, pair.generate(questions, max_new_tokens=24, stop=["\n"]), strict=True):
        print(f"{question} {reply.text}")


if __name__ == "__main__":
    main()
