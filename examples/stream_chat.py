"""A conversation, printed as it is decoded. Each turn re-uses what the one before has encoded."""

import dominotree as dt

TURNS = ("What is the capital of France?", "And what is it known for?")


def main() -> None:
    """Sends the turns one after another."""
    pair = dt.load("smollm2-135m")
    chat = pair.chat(system="Answer in one sentence.", max_new_tokens=48)
    for turn in TURNS:
        print(f"> {turn}")
        reply = chat.send(turn)
        for piece in reply:
            print(piece, end="", flush=True)
        stats = reply.output.stats
        print(f"\n  [{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens were there already]\n")


if __name__ == "__main__":
    main()
