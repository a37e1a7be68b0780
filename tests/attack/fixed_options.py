"""Fixed cases of options beyond all bounds, odd names, and meaningless settings."""

from __future__ import annotations

from support.foreign import BOMB

from attack.fixed_case import TINY, Case, Wanted


def options(*words: str, names: tuple[str, ...] = (), wanted: Wanted = "warned") -> Case:
    """A case of options on the command line; its error or warning has to name one of them, or one of ``names``."""
    parts = [word.partition("=") for word in words if word.startswith("--")]
    keys = [part for key, _, value in parts for part in (key.removeprefix("--"), value) if len(part) > 1]
    return Case(lambda folder: [[*TINY, *words]], names or tuple(keys), wanted)


_VAST = str(10**20)
_LONG = "x" * 300
_SPLIT = ("--data.stream", "ClassSplit", "--data.stream.source", "Synthetic", "--data.stream.source.num_classes")
_ER = ("--methods.er", "ER")

CASES: dict[str, Case] = {
    "yaml bomb as an option": options(f"--methods={BOMB}"),
    "many digits as an option": options(f"--data.num_clients={'9' * 5000}"),
    "a number in base 60 as an option": options("--schedule.batch_size=1:30"),
    "a number in base 8 as an option": options("--data.num_clients=010"),
    # Numbers.
    "clients beyond all bounds": options(f"--data.num_clients={_VAST}"),
    "a billion clients": options("--data.num_clients=1000000000"),
    "rounds beyond all bounds": options(f"--schedule.rounds_per_task={_VAST}"),
    "batches beyond all bounds": options(f"--schedule.batch_size={_VAST}"),
    "epochs beyond all bounds": options(f"--schedule.local_epochs={_VAST}"),
    "cohorts beyond all bounds": options(f"--schedule.cohort_width={_VAST}"),
    "tasks beyond all bounds": options(f"--data.stream.num_tasks={_VAST}"),
    "samples beyond all bounds": options(f"--data.stream.source.train_size={_VAST}"),
    "pixels beyond all bounds": options(f"--data.stream.source.shape=[1, {_VAST}, 4]"),
    "large images": options("--data.stream.source.shape=[1, 100000, 100000]", names=("shape",)),
    "classes beyond all bounds": options(f"--data.stream.source.num_classes={_VAST}"),
    "workers beyond all bounds": options("--engine.kind=workers", f"--engine.workers={_VAST}"),
    "seed beyond all bounds": options(f"--seed_everything={_VAST}"),
    "devices beyond all bounds": options("--trainer.devices=100000", names=("devices", "100000")),
    "learning rate of 0": options("--model.optimizer.lr=0", names=("lr",)),
    "learning rate of 1e308": options("--model.optimizer.lr=1e308", names=("lr",)),
    "negative learning rate": options("--model.optimizer.lr=-1", names=("lr", "learning rate: -1")),
    "learning rate nan": options("--model.optimizer.lr=.nan", names=("lr",)),
    "learning rate inf": options("--model.optimizer.lr=.inf", names=("lr",)),
    "wide layers": options("--model.network.hidden=[100000, 100000]", names=("hidden", "100000 x 100000")),
    "many layers": options(f"--model.network.hidden={[1] * 200}", wanted="either"),
    "a thousand numbers": options(f"--data.stream.source.mean={[1] * 1000}", names=("mean",)),
    "a buffer of 10^15": options(*_ER, "--buffer.size=1000000000000000", names=("buffer",)),
    "replays of 10^15": options(*_ER, "--methods.er.size=1000000000000000", names=("methods.er.size",)),
    "a memory of 10^15": options(
        "--data.scenario=class",
        *_SPLIT,
        "4",
        "--methods.i=ICaRL",
        "--methods.i.size=1000000000000000",
        names=("methods.i.size",),
    ),
    "noise inf": options("--data.stream.source.noise=.inf", names=("noise",)),
    # Names.
    "a long folder": options(f"--run.dir={_LONG}", names=("run.dir",)),
    "a long path": options(f"--run.dir={'/'.join(['x' * 200] * 30)}", names=("run.dir",)),
    "a long benchmark": options(f"--run.benchmark={_LONG}", wanted="either"),
    "a long method's name": options(f"--methods.{_LONG}=EWC", names=("methods",), wanted="either"),
    "a long checkpoint": options(f"--ckpt_path={_LONG}", names=("ckpt_path",)),
    "a long configuration": options(f"--config={_LONG}.yaml", names=("config",)),
    "a long data root": options(f"--data.root={_LONG}", "--data.stream.source=Digits", names=("data.root",)),
    "a long path of data": options(
        "--data.stream.source=Arrays", f"--data.stream.source.path={_LONG}", names=("path",)
    ),
    "NUL in a folder": options("--run.dir=a\0b", names=("run.dir",)),
    "NUL in a checkpoint": options("--ckpt_path=a\0b", names=("ckpt_path",)),
    "NUL in a configuration": options("--config=a\0b", names=("config",)),
    "NUL in a data root": options("--data.root=a\0b", "--data.stream.source=MNIST", names=("data.root",)),
    "a folder that is a file": options("--run.dir=/dev/null", names=("run.dir",)),
    "a folder that cannot be": options("--run.dir=/proc/none/run", names=("run.dir",)),
    # Meaningless settings.
    "one class per task": options(*_SPLIT, "4", "--data.stream.num_tasks=4", names=("class", "num_tasks")),
    "one class": options("--data.stream.source.num_classes=1", names=("class",)),
    "a share of 0 for validation that is scored": options(
        "--data.evaluate_on=validation", names=("validation", "evaluate_on")
    ),
    "half precision weights": options("--trainer.precision=16-true", names=("precision",)),
    "clipping at 0": options("--trainer.gradient_clip_val=0", wanted="either"),
    "no image drawn": options("--run.samples=-1", names=("run.samples",)),
    "a share of 0 for checkpoints": options("--checkpoint.share=0"),
    "a target of 0": options("--targets.accuracies=[0]", names=("targets",)),
    "a target of 101": options("--targets.accuracies=[101]", names=("targets",)),
    "targets that are none": options("--targets.accuracies=[.nan]", names=("targets",)),
    "two same methods": options("--methods.a=EWC", "--methods.b=EWC", names=("methods",), wanted="either"),
    "no clients": options("--data.num_clients=0"),
    "no rounds": options("--schedule.rounds_per_task=0"),
    "no clients in a round": options("--schedule.clients_per_round=0"),
    "rounds of no task": options("--schedule.rounds_per_task=[]", names=("rounds_per_task",)),
    "rounds of a third task": options("--schedule.rounds_per_task=[1, 1, 1]", names=("rounds_per_task",)),
}
"""Name -> case."""
