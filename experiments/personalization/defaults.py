"""The boards with the default values of all arguments: what is left of the gaps without tuning?

python -m experiments.personalization.defaults labels_small vehicle   # runs what is missing
"""

import sys

from experiments.personalization.results import BOARDS, DEFAULTS, open_study

if __name__ == "__main__":
    for board in sys.argv[1:] or BOARDS:
        open_study(board, DEFAULTS).run()
