"""Help of the command line, as text: the parsers that could write it need seconds to build."""

import textwrap

from pl_fed.command.program import program_name
from pl_fed.version import __version__

OVERVIEW = """\
usage: {program} COMMAND ...

Simulate federated learning, personalized, fair and robust at once. A whole
federation is one PyTorch Lightning fit: a communication round is an epoch.

  fit         train a federation, test it, and save results below runs/
  validate    evaluate a checkpoint on the clients' validation data
  test        evaluate a checkpoint on the clients' test data
  predict     write the predictions of a checkpoint for the clients' test data
  study       run all combinations of algorithms, attacks … and seeds of a file
  report      compare runs in one HTML page that opens offline
  partition   print and draw the data split over the clients, without training
  export      write clients' models as files that load without pl_fed
  list        list algorithms, attacks, defences, partitioners, data or configs

Examples
  {program} fit --config quickstart
  {program} fit --config fashion_mnist --config ditto --model.lam 0.3
  {program} fit --config quickstart --config label_poisoning \\
      --federation.aggregator Median
  {program} report runs/quickstart

{program} COMMAND --help explains a command. This is pl_fed {version}.
"""

FIT = """\
usage: {program} fit --config CONFIG [--config CONFIG] [--OPTION VALUE]

Train a federation, test its final models, and save the results below runs/.

Run
  --config CONFIG                     a YAML file, or a name of `list configs`;
                                      a later config changes an earlier one
  --trainer.max_epochs N              number of communication rounds
  --trainer.check_val_every_n_epoch N validate every N rounds
  --trainer.default_root_dir FOLDER   parent of the runs' folders
  --trainer.accelerator NAME          cpu, gpu or auto
  --trainer.logger false              log to no further logger, such as W&B
  --seed_everything N                 seed of all random draws
  --ckpt_path last                    resume the newest unfinished run of this
                                      config; or FOLDER: that of a run
Algorithm
  --model NAME                        one of `list algorithms`
  --model.net NAME                    one of `list models`, or your own class
  --model.optimizer.lr X              learning rate of the clients
  --model.local_epochs N              passes over a client's data in a round
Data
  --data.dataset NAME                 one of `list data`
  --data.partitioner NAME             one of `list partitioners`
  --data.num_clients N                number of clients
  --data.batch_size N                 samples in a minibatch
Federation
  --federation.sampler.cohort_size N  number of clients in a round
  --federation.aggregator NAME        one of `list defences`
  --federation.adversary.attack NAME  one of `list attacks`
  --federation.adversary.fraction X   share of Byzantine clients, such as 0.2
  --federation.engine.name NAME       auto (a rule), fastest (a measurement),
                                      one_by_one, stacked or a compiled one

  --model.help NAME                   the options of an algorithm; any option
                                      that takes a NAME has such a .help
  --print_config                      print the complete config, and stop
  --help all                          all options

Example: {program} fit --config fashion_mnist --config ditto
"""

EVALUATION = """\
usage: {program} {command} --config CONFIG --ckpt_path CHECKPOINT

{purpose}

  --config CONFIG                     the configs of the run, as for fit
  --ckpt_path CHECKPOINT              a file, the folder of a run, or last: the
                                      newest run below trainer.default_root_dir
                                      with this config
  --trainer.default_root_dir FOLDER   parent of the runs' folders
  --trainer.accelerator NAME          cpu, gpu or auto
{options}
  --help all                          all options; they are those of fit

Example: {program} {command} --config quickstart --ckpt_path last
"""

STUDY = """\
usage: {program} study FILE [--OPTION VALUE]

Run the cells of a study that have no result yet: one run for each combination
of the values on its axes, and each seed. Finished cells are skipped, stopped
ones resume, failed ones are tried again. Results go to runs/NAME/results.csv.

  FILE                                a YAML file with the keys name, extends,
                                      base, axes, seeds, leave_out, compare,
                                      tune and options
  --dry_run                           check all configs, print the cells and
                                      the estimated time, and stop
  --status                            count the cells by state and axis
  --report                            write tables and pictures of the results
                                      so far to runs/NAME/report; runs nothing
  --only AXIS=LABEL                   only these cells; may be repeated
  --again CELL                        run a cell anew in a folder of its own,
                                      and print old results beside new ones
  --workers N                         number of processes, one thread each; by
                                      default the number of cores
  --on ray | slurm                    run cells on a Ray cluster, or as jobs of
                                      Slurm
  --folder FOLDER                     folder of the study

Example: {program} study configs/studies/digits_under_attack.yaml
"""

PARTITION = """\
usage: {program} partition --config CONFIG [--OPTION VALUE]

Print and draw the number of samples of each class on each client, and write
split.csv and split.png. Trains nothing.

  --config CONFIG                     a YAML file, or a name of `list configs`
  --data.dataset NAME                 one of `list data`
  --data.partitioner NAME             one of `list partitioners`
  --data.partitioner.OPTION VALUE     an option of it, for example beta
  --data.num_clients N                number of clients
  --data.skew NAME                    one of `list skews`
  --data.seed N                       seed of the split
  --trainer.default_root_dir FOLDER   parent of the result's folder

  --data.partitioner.help NAME        the options of a partitioner
  --help all                          all options

Example: {program} partition --config fashion_mnist \\
             --data.partitioner Dirichlet --data.partitioner.beta 0.1
"""

LIST = """\
usage: {program} list KIND

Print one line for each class, or config, of a kind. The kinds are
{kinds}

Example: {program} list defences
"""

LIGHTNING_OPTIONS = {  # texts of `--help all` in place of Lightning's
    "ckpt_path": (
        "The run that the command continues or evaluates: ``last``, the newest one with this"
        " config; the folder of a run; or the path or address of a checkpoint, from which ``fit``"
        " starts a new folder."
    ),
    "weights_only": "Refused if ``false``: loading a checkpoint runs no code of it.",
    "trainer.precision": "``32-true``, ``64-true`` or ``bf16-mixed``.",
    "trainer.logger": (
        "Loggers beside ``metrics.csv``, which every run writes; ``true`` and ``false`` add none."
    ),
    "trainer.max_epochs": (
        "Largest number of communication rounds; 1000 if ``max_steps`` is not set either."
    ),
    "trainer.max_steps": (
        "Largest number of communication rounds, like ``max_epochs``; -1 is no limit."
    ),
    "trainer.limit_train_batches": "Limit of a client's local steps in a round: number or share.",
    "trainer.limit_val_batches": (
        "Batches of ``data.clients_per_eval_batch`` clients in a validation: a number or a share."
    ),
    "trainer.limit_test_batches": (
        "Batches of ``data.clients_per_eval_batch`` clients in a test: a number or a share."
    ),
    "trainer.val_check_interval": "Refused: set ``check_val_every_n_epoch``.",
    "trainer.check_val_every_n_epoch": "A validation follows every so many rounds.",
    "trainer.log_every_n_steps": (
        "Rounds after which their rows are written to ``metrics.csv`` and every logger; 1 by"
        " default. No row is lost. 0 writes no ``train/*``."
    ),
    "trainer.enable_checkpointing": "Whether a run writes checkpoints, ``last.ckpt`` by default.",
    "trainer.accumulate_grad_batches": (
        "Minibatches of a client in one step of its local optimizer."
    ),
    "trainer.gradient_clip_val": (
        "Limit of the gradients of each model of each client, by norm or by value."
    ),
    "trainer.default_root_dir": "Parent of the runs' folders, a local one; ``runs`` by default.",
    "trainer.barebones": "Refused, because ``metrics.csv`` is always written.",
    "trainer.reload_dataloaders_every_n_epochs": "Refused: a federation loads its data once.",
}

_EVALUATIONS = {
    "validate": ("Evaluate a checkpoint on the clients' validation data.", ""),
    "test": ("Evaluate a checkpoint on the clients' test data.", ""),
    "predict": (
        "Write the predictions of a checkpoint for the clients' test data.",
        "  --data.predict_clients IDS          ids, such as [0,3]; all by default\n",
    ),
}
WITH_A_PAGE = ("fit", *_EVALUATIONS, "study", "partition", "list")


def help_page(command: str | None, kinds: tuple[str, ...] = ()) -> str:
    """Return the help of a command, or of all commands.

    Args:
        command: One of ``WITH_A_PAGE``; ``None`` for the overview.
        kinds: The kinds that ``list`` knows.
    """
    program = program_name()
    if command in _EVALUATIONS:
        purpose, options = _EVALUATIONS[command]
        return EVALUATION.format(program=program, command=command, purpose=purpose, options=options)
    pages = {
        None: OVERVIEW,
        "fit": FIT,
        "study": STUDY,
        "partition": PARTITION,
        "list": LIST,
    }
    lines = textwrap.wrap(f"{', '.join(kinds)}.", 76)
    return pages[command].format(
        program=program, version=__version__, kinds=textwrap.indent("\n".join(lines), "  ")
    )
