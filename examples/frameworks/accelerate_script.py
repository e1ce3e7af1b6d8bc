"""Run accelerate's own test script: data loaders, random states, training, triggers.

    torchrun --nproc-per-node 2 examples/frameworks/accelerate_script.py --backend shotcast

On CPUs accelerate makes no group of another backend than gloo or mpi, but keeps the one that it finds.
"""

import os

from common import arguments, join


def main() -> None:
    options = arguments(__doc__).parse_args()
    if join(options).type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # as "accelerate launch --cpu" does
    from accelerate.test_utils.scripts import test_script  # which reads the environment

    test_script.main()  # and ends the group
    print("accelerate's test script has passed\n", end="")


if __name__ == "__main__":
    main()
