"""Tests the integration with Lightning, in processes: steps, metrics, folders, the command line, several devices."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import torchrun
from support.mpi import warm_environment

LIGHTNING_STEPS = """
    import sys
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
    for each, accumulated in (0, 2), (3, 1):
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
    assert told == ["steps 3 3", "steps 2 2"], ended.output()
    assert "MPI False" in ended.stdout.splitlines()


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
