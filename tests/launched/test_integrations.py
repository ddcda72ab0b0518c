"""Tests the integrations with the real libraries, in processes: each program has one line of asyncdist."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from scripts import integrations, out_of_memory
from support import mpi, torchrun, warm

SCRIPT = Path(integrations.__file__)
#: Values that each program passes to ``Model.end``:
#:
#: - ``processes``: number of processes that the library sees;
#: - ``folders``: True if the program passes ``os.listdir`` of its folder, which must contain only subfolders ``rankN``;
#: - ``replacements``: True if the library's log counts replacements, and the program passes the last count;
#: - ``saved``: paths in the subfolder of the rank. The program passes them relative to its folder, and then
#:   ``logs/rankN``, where the library logs;
#: - any other key: the expected value.
SEEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "accelerate": {"processes": 1, "saved": ["checkpoints/checkpoint_0", "checkpoints/checkpoint_1"]},
    "lightning": {"processes": 1, "folders": True, "replacements": True},
    "transformers": {"processes": 1, "folders": True, "replacements": True, "seed": 42},
    "torchgfn": {},
}


def check(reports: Any, ranks: int, library: str) -> None:
    """Check that the last rank has the mean of the others, and that the others have their own weights."""
    assert sorted(reports) == list(range(ranks))
    for rank, report in reports.items():
        expected = dict(SEEN[library])
        if "folders" in expected:
            assert f"rank{rank}" in report["folders"] and set(report["folders"]) <= {f"rank{r}" for r in range(ranks)}
            expected["folders"] = report["folders"]
        if "replacements" in expected:
            expected["replacements"] = int(rank == ranks - 1 > 0)
        if "saved" in expected:
            folders = [f"rank{rank}/{name}" for name in expected["saved"]]
            expected["saved"] = [*folders, f"logs/rank{rank}"]
        weight = sum(range(ranks - 1)) / (ranks - 1) if rank == ranks - 1 else float(rank)
        assert report == {"weights": [weight] * 4, **expected}


def warm_environment() -> dict[str, str]:
    return warm.environment(mpi.base_environment(), *warm.LIBRARIES)


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", SEEN)
def test_on_mpi(library: str, tmp_path: Path) -> None:
    check(
        mpi.run_ranks(3, SCRIPT, library, tmp_path, timeout_s=240, env=warm_environment()).check().reports, 3, library
    )


@pytest.mark.mpi  # Lightning asks mpi4py if it is installed, and so loads MPI
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["lightning", pytest.param("transformers", marks=pytest.mark.long)])
def test_on_torch(library: str, tmp_path: Path) -> None:
    check(
        torchrun.run_ranks(2, SCRIPT, library, tmp_path, timeout_s=240, env=warm_environment()).check().reports,
        2,
        library,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("library", ["plain", pytest.param("lightning", marks=pytest.mark.long)])
def test_alone_it_trains_and_says_once_that_nothing_is_averaged(library: str, tmp_path: Path) -> None:
    ended = torchrun.run_alone(SCRIPT, library, tmp_path).check()
    assert ended.stderr.count("trains alone") == 1, ended.stderr
    assert ended.reports[0]["weights"] == [0.0] * 4


@pytest.mark.mpi
@pytest.mark.long  # Accelerate's imports run twice, which takes ten seconds
def test_one_process_of_accelerate_launch_says_why_it_is_alone(tmp_path: Path) -> None:
    """Regression: on CPUs it starts one process, whatever is requested, and did not say so."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    ended = torchrun.run_jobs(
        [([*launch, str(SCRIPT), "plain", str(tmp_path)], {"HF_HOME": str(tmp_path)})], 100.0
    ).check()
    assert ended.stderr.count("trains alone") == 1, ended.stderr
    assert "without --multi_gpu, accelerate launch ignores --num_processes" in ended.stderr


NOTEBOOK_LAUNCHER = """
    from asyncdist.integrations.accelerate import SelectiveAveraging
    from asyncdist.launchers.addresses import find_free_port
    from accelerate import Accelerator, notebook_launcher
    import torch

    def train():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        averaging = SelectiveAveraging(model, optimizer, average_every=2)
        print(accelerator.num_processes, "of", averaging.policy.world.size)

    if __name__ == "__main__":
        notebook_launcher(train, num_processes=2, use_port=str(find_free_port()))
"""


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_of_notebook_launcher_average(tmp_path: Path) -> None:
    """Regression: if the notebook had imported the integration before, Accelerate wrapped the model in DDP."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(NOTEBOOK_LAUNCHER))
    ended = torchrun.run_alone(script).check()
    assert [line for line in ended.stdout.splitlines() if " of " in line] == ["1 of 2"] * 2, ended.output()


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_diloco_resumes_in_each_library_to_the_same_bits(tmp_path: Path) -> None:
    script = SCRIPT.parent / "resumed_trainings.py"
    reports = mpi.run_ranks(2, script, tmp_path, timeout_s=240, env=warm_environment()).check().reports
    expected = {"is_equal": True, "weights": [[1 / 3, 2 / 3]] * 5, "averages": 5}  # of steps 10, 20, 30, 40, 50
    for rank in range(2):
        assert len(reports[rank]) >= 3
        for library, found in reports[rank].items():
            assert found == expected, f"{library}, rank {rank}"


LIGHTNING_STEPS = """
    import sys
    import types
    import lightning.pytorch as pl
    import torch
    from asyncdist.integrations import lightning

    class Module(pl.LightningModule):
        def __init__(self, each):
            super().__init__()
            self.net, self.each = torch.nn.Linear(2, 1), each
            self.automatic_optimization = not each

        def training_step(self, batch, index):
            loss = self.net(batch[0]).sum()
            losses.append(loss.item())
            if self.each and index % self.each == self.each - 1:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Count(pl.Callback):
        def on_train_end(self, trainer, module):
            print("steps", averaging.policy.iteration, trainer.global_step)
            assert abs(averaging._loss() - sum(losses) / 6) < 1e-4, "gradient accumulation does not divide its losses"

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 2)))
    for each, accumulated, found in (0, 2, True), (3, 1, True), (0, 2, False):
        if not found:  # as in a version of Lightning that counts elsewhere
            steps_of = lightning._steps_of
            lightning._steps_of = lambda trainer: steps_of(types.SimpleNamespace(global_step=trainer.global_step))
            lightning._GlobalStep.completed = property(lambda steps: trainer.global_step)
        averaging, losses = lightning.SelectiveAveraging(100), []
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", accumulate_grad_batches=accumulated, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, callbacks=[averaging, Count()])
        trainer.fit(Module(each), data)
    print("MPI", "mpi4py.MPI" in sys.modules)
"""


@pytest.mark.mpi
def test_a_step_of_lightnings_optimizer_is_a_step_of_the_policy(tmp_path: Path) -> None:
    """Lightning must not ask MPI for ranks: a rank that ended irregularly then left a segment of shared memory."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(LIGHTNING_STEPS))
    ended = torchrun.run_alone(script).check()
    told = [line for line in ended.stdout.splitlines() if line.startswith("steps")]
    assert told == ["steps 3 3", "steps 2 2", "steps 3 3"], ended.output()
    assert "MPI False" in ended.stdout.splitlines()


ACCELERATE_STEPS = """
    from asyncdist.integrations.accelerate import SelectiveAveraging
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2)))
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    averaging = SelectiveAveraging(model, optimizer, 100)
    losses = []
    for (batch,) in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            info = averaging.step(loss)
            assert info is not None and not info
            losses.append(loss.item())
            print("steps", averaging.policy.iteration)
    assert abs(averaging._loss() - sum(losses) / 6) < 1e-4, "it is judged by all of them"
"""


@pytest.mark.mpi
@pytest.mark.long  # the imports take as long as in the test of Lightning's optimizer
def test_a_step_of_accelerates_optimizer_is_a_step_of_the_policy(tmp_path: Path) -> None:
    """Regression: step changed weights while gradients were accumulated, although optimizer.step() did nothing."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(ACCELERATE_STEPS))
    ended = torchrun.run_alone(script).check()
    told = [line for line in ended.stdout.splitlines() if line.startswith("steps")]
    assert told == ["steps 0", "steps 0", "steps 0", "steps 1", "steps 1", "steps 2"], ended.output()


LIGHTNING_METRICS = """
    import sys
    import lightning.pytorch as pl
    import torch
    from asyncdist.integrations.lightning import SelectiveAveraging

    class Module(pl.LightningModule):
        def __init__(self, returns):
            super().__init__()
            self.net, self.returns, self.automatic_optimization = torch.nn.Linear(2, 1), returns, False

        def training_step(self, batch, index):
            loss = self.net(batch[0]).sum()
            self.manual_backward(loss)
            self.optimizers().step()
            self.log("train_loss", loss)
            return loss if self.returns else None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 2)))
    cases = [("val_los", True), ("train_loss", False), (None, False), (None, True)]
    for number, (monitor, returns) in enumerate(cases):
        trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, callbacks=[SelectiveAveraging(2, monitor=monitor)])
        print("training", number, file=sys.stderr, flush=True)
        trainer.fit(Module(returns), data)
"""


@pytest.mark.mpi
def test_a_metric_that_lightning_never_has_is_warned_of_once(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(LIGHTNING_METRICS))
    ended = torchrun.run_alone(script).check()
    said = [told.count("has no metric so far, so it cannot be judged") for told in ended.stderr.split("training ")]
    assert said == [0, 1, 0, 1, 0], ended.output()
    assert "the monitored metric 'val_los' has not been logged; logged metrics: train_loss" in ended.stderr
    assert "training_step has not returned a loss" in ended.stderr


MONITORED = """
    import sys

    from asyncdist.integrations import lightning, transformers as hf
    import lightning.pytorch as pl
    import torch
    from asyncdist.protocols import StepInfo
    from asyncdist.protocols.metrics import NOT_MEASURED
    from transformers import Trainer, TrainingArguments

    def watched(averaging):
        def step(metric, tokens=None):
            nonlocal count
            count += 1
            if count % 2 == 0:
                seen.append(metric() is not NOT_MEASURED)
            return StepInfo(averaged_this_iteration=count == 17)

        count, seen = 0, []
        averaging._training.step = step
        return seen

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    averaging = lightning.SelectiveAveraging(2, monitor="val_loss")
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)))
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, num_sanity_val_steps=0, callbacks=[averaging])
    seen = watched(averaging)
    trainer.fit(Module(), data, data)
    print("lightning", [place for place, is_new in enumerate(seen) if is_new], len(seen), file=sys.stderr)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def forward(self, inputs, **_):
            return {"loss": self.net(inputs).square().mean()}

    averaging = hf.SelectiveAveraging(2, monitor="eval_loss")
    arguments = TrainingArguments(output_dir=sys.argv[1], max_steps=24, per_device_train_batch_size=1, use_cpu=True,
        report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=8, label_names=["inputs"])
    rows = [{"inputs": torch.ones(2)}] * 8
    seen = watched(averaging)
    Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[averaging]).train()
    print("transformers", [place for place, is_new in enumerate(seen) if is_new], len(seen), file=sys.stderr)
"""


@pytest.mark.mpi
def test_a_monitored_metric_is_judged_once(tmp_path: Path) -> None:
    """Regression: one validation counted at each report until the next validation, even for replaced weights.

    A rank with a bad validation was replaced again and again, and metrics before the first validation were NaN. Here
    the weights are replaced in step 17, after the second validation.
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(MONITORED))
    ended = torchrun.run_alone(script, tmp_path, timeout_s=200.0).check()
    for library in "lightning", "transformers":
        assert f"{library} [4] 12" in ended.stderr, ended.output()


LIGHTNING_FOLDERS = """
    import copy, os, sys
    import wandb
    from importlib import import_module
    from pathlib import Path
    from asyncdist.integrations.lightning import SelectiveAveraging
    import torch
    from support.mpi import report
    pl = import_module(sys.argv[1])
    callbacks, profilers = import_module(sys.argv[1] + ".callbacks"), import_module(sys.argv[1] + ".profilers")
    os.chdir(sys.argv[2])

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.batches = torch.nn.Linear(2, 1), 0

        def training_step(self, batch, index):
            self.batches += 1
            return self.net(batch[0]).square().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Fails(pl.Callback):
        def on_train_end(self, trainer, module):
            raise ZeroDivisionError

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 2)))

    def fit(epochs, *others):
        averaging = SelectiveAveraging(100)
        saving = callbacks.ModelCheckpoint(dirpath="saved", save_last=True)
        options = dict(accelerator="cpu", devices=1, enable_progress_bar=False, logger=False)
        options["profiler"] = profilers.SimpleProfiler(dirpath="profiles", filename="profile")
        trainer = pl.Trainer(max_epochs=epochs, callbacks=[averaging, saving, *others], **options)
        trainer.fit(module, data, ckpt_path="last")
        return saving

    module = Module()
    saving = fit(1)
    fit(3)
    try:
        fit(4, callbacks.OnExceptionCheckpoint("failed"), Fails())
    except ZeroDivisionError:
        pass
    folder = Path(saving.dirpath).name
    asked, wandb.init = [], lambda **options: asked.append(options["dir"])
    logger = import_module(sys.argv[1] + ".loggers").WandbLogger(save_dir="runs", offline=True)
    pl.Trainer(callbacks=[SelectiveAveraging(100)], logger=logger, accelerator="cpu", devices=1)
    assert logger.experiment is None and os.path.isdir(asked[0])
    assert (asked[0], logger.save_dir) == (f"runs/{folder}",) * 2, "wandb writes for each rank"
    try:
        copy.deepcopy(SelectiveAveraging(100))
    except TypeError as error:
        assert "cannot be copied" in str(error)
    else:
        raise AssertionError("a policy is of one training")
    mine = [str(path) for path in Path().rglob("*") if path.is_file() and folder in path.parts]
    failed = torch.load(f"failed/{folder}/on_exception.ckpt", weights_only=True)["callbacks"]
    report(int(folder[-1]), [module.batches, sorted(mine), failed["SelectiveAveraging()"]["iteration"]])
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.long)])
def test_lightning_goes_on_from_the_last_checkpoint_of_each_rank(library: str, tmp_path: Path) -> None:
    """Regression: Lightning searched before it knew the rank's folder, found none, and started from the beginning."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(LIGHTNING_FOLDERS))
    folder = tmp_path / "runs"
    folder.mkdir()
    reports = torchrun.run_ranks(2, program, library, folder, timeout_s=240, env=warm_environment()).check().reports
    for rank in range(2):
        batches, files, iteration = reports[rank]
        assert batches == 6 * 4, "no epoch may be trained twice"
        assert iteration == 6 * 4, "a checkpoint saved during an exception must contain the policy's state"
        assert {f"saved/rank{rank}/last.ckpt", f"failed/rank{rank}/on_exception.ckpt"} <= set(files), files
        assert f"profiles/rank{rank}/fit-profile.txt" in files, files
    assert not [path for path in folder.rglob("*.*") if path.is_file() and not path.parent.name.startswith("rank")]


LIGHTNING_CLI = """
    from asyncdist.integrations.lightning import Averaging, SelectiveAveraging
    import contextlib, io, os, sys, torch
    from lightning.pytorch import LightningModule
    from lightning.pytorch.cli import LightningCLI
    from support.mpi import report
    os.chdir(sys.argv[1])

    class Module(LightningModule):
        def __init__(self, width: int = 2):
            super().__init__()
            self.layer = torch.nn.Linear(width, 1)

        def training_step(self, batch, index):
            return self.layer(batch).square().sum()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(32, 2))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def refusal(*arguments):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            LightningCLI(Module, run=False, args=["--config", "run.yaml", *arguments])
        return said.getvalue()

    option = "--trainer.callbacks.init_args."
    refusals = [refusal(option + "replacment_ratio=1"), refusal(option + "replacement_ratio=half")]
    cli = LightningCLI(Module, args=["fit", "--config", "run.yaml"])
    (averaging,) = [each for each in cli.trainer.callbacks if isinstance(each, SelectiveAveraging)]
    rank = int(cli.trainer.default_root_dir[-1])
    other = LightningCLI(Module, run=False, args=["--config", "gossip.yaml"])
    (gossip,) = [each for each in other.trainer.callbacks if isinstance(each, Averaging)]
    report(rank, [cli.trainer.global_step, averaging.last_info is not None, refusals, gossip._training.options])
"""
CLI_CONFIG = """
trainer:
  max_epochs: 1
  devices: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  callbacks:
    - class_path: asyncdist.integrations.lightning.SelectiveAveraging
      init_args:
        average_every: 5
        replacement_ratio: 0.5
        averaging_strategy: best_only
        optimizer_state: reset
        threshold: 0.5
        name: from the file
        start_timeout_s: 100
"""
CLI_CONFIG_OF_GOSSIP = """
trainer:
  devices: 1
  accelerator: cpu
  callbacks:
    - class_path: asyncdist.integrations.lightning.Averaging
      init_args:
        policy: protocols.GossipPolicy
      dict_kwargs:
        average_every: 5
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_lightning_cli_reads_the_options_from_a_file(tmp_path: Path) -> None:
    """Regression: the CLI passed ``replica_size=1``, which was refused, and accepted no option of the policy."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(LIGHTNING_CLI))
    (tmp_path / "run.yaml").write_text(CLI_CONFIG)
    (tmp_path / "gossip.yaml").write_text(CLI_CONFIG_OF_GOSSIP)
    reports = torchrun.run_ranks(2, program, tmp_path, timeout_s=240, env=warm_environment()).check().reports
    for rank in range(2):
        steps, has_stepped, (misspelled, mistyped), options_of_gossip = reports[rank]
        assert steps == 32 and has_stepped
        assert "replacment_ratio" in misspelled and "not accepted" in misspelled, misspelled
        assert "replacement_ratio" in mistyped and "half" in mistyped, mistyped
        assert options_of_gossip == {"average_every": 5}


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_rank_that_runs_out_of_memory_begins_again_alone(tmp_path: Path) -> None:
    """Regression: the rank waited for a start of all ranks; after ``start_timeout_s`` all lost their training."""
    program = Path(out_of_memory.__file__)
    ended = mpi.run_ranks(2, program, tmp_path, timeout_s=240, env=warm_environment()).check()
    assert ended.stderr.count("asyncdist run --prefix") == 1, "asyncdist run --prefix must be suggested once"
    reports = ended.reports
    steps = out_of_memory.ROWS // out_of_memory.BATCH
    for library in out_of_memory.LIBRARIES:
        assert reports[0][library] == {"iterations": [steps], "policies": 1}, library
        # Rank 1 fails in its third step, and begins again with half of the batch.
        assert reports[1][library] == {"iterations": [2, 2 + 2 * steps], "policies": 1}, library


def test_simulated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncdist", "sim", str(SCRIPT), "--ranks", "3", "plain", "none"]
    environment = {**mpi.base_environment(), mpi.REPORTS: str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "ranks 0 to 2: None" in ended.stdout
    check({rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)}, 3, "plain")


@pytest.mark.mpi
@pytest.mark.timeout(500)
@pytest.mark.parametrize("library", ["lightning", "transformers"])
@pytest.mark.parametrize("run", [mpi.run_ranks, torchrun.run_ranks], ids=["mpi", "torch"])
@pytest.mark.long
def test_two_replicas_of_two_ranks_in_a_trainer_under_ddp(library: str, run: Any, tmp_path: Path) -> None:
    reports = run(4, SCRIPT.parent / "trainer_replicas.py", library, tmp_path, timeout_s=400).check().reports
    for rank in range(4):
        assert reports[rank]["weights"] == ([3.0, 1.0] if rank >= 2 else [1.0]), (
            "each rank must have the weights of its replica's first rank"
        )
        assert reports[rank]["sizes"] == [2, 2], "the library must see only the replica's ranks"
        assert set(reports[rank]["folders"]) <= {"replica0", "replica1"}
        assert rank % 2 or f"replica{rank // 2}" in reports[rank]["folders"], (
            "only the first rank of each replica may write"
        )
        # The replicas' changes are 2 * 0.5 and 2 * 2.5, and the momentum is 3 after the first round.
        assert reports[rank]["sharded False"] == [-3.0 - 4.5] * 4, "the checkpoint must have the states of all ranks"
        assert library != "lightning" or reports[rank]["sharded True"] == [-7.5] * 4


FIT = """
import torch
from asyncdist.integrations.lightning import SelectiveAveraging
import lightning.pytorch as pl
from torch.utils.data import DataLoader

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    averaging = SelectiveAveraging(5, **{options!r})
    options = dict(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, **{trainer!r})
    trainer = pl.Trainer(callbacks=[averaging], **options)
    trainer.fit(Module(), DataLoader(torch.ones(8, 2)))
    print("trained on", trainer.world_size)
"""


def fit(folder: Path, options: dict[str, Any], trainer: dict[str, Any]) -> torchrun.Result:
    """Fit without a launcher. Processes that Lightning starts are children of this process."""
    script = folder / "fit.py"
    script.write_text(FIT.replace("{options!r}", repr(options)).replace("{trainer!r}", repr(trainer)))
    return torchrun.run_jobs([([sys.executable, str(script)], {})], 200.0)


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_trainer_of_several_devices_is_refused_with_one_error(tmp_path: Path) -> None:
    """Regression: Lightning's process for the second device failed with an error about torchrun's variables."""
    ended = fit(tmp_path, {}, {"devices": 2})
    assert ended.returncodes == (1,)
    assert ended.stderr.count("Error: ") == 1 and "ValueError: devices must be 1 for each rank, got 2" in ended.stderr
    assert "replica_size=2" in ended.stderr and ended.stderr.count("trains alone") == 1


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_trainer_that_pickles_its_callback_is_refused(tmp_path: Path) -> None:
    ended = fit(tmp_path, {}, {"devices": 2, "strategy": "ddp_spawn"})
    assert ended.returncodes == (1,) and "ValueError: SelectiveAveraging cannot be sent to another" in ended.stderr


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_replica_without_a_launcher_says_once_that_it_is_alone(tmp_path: Path) -> None:
    ended = fit(tmp_path, {"replica_size": 2}, {"devices": 2, "strategy": "ddp"}).check()
    assert ended.stdout.count("trained on 2") == 2 and ended.stderr.count("trains alone") == 1, ended.output()
