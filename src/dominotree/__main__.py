"""`python -m dominotree`: the same as the `dominotree` command."""

from dominotree.cli import main

if __name__ == "__main__":
    main()
