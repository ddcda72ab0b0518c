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
from support import mpi, torchrun
from support.mpi import warm_environment
from support.seeds import in_ci

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


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", in_ci(SEEN, "accelerate", "transformers"))
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
            resumed = 3 if library == "accelerate" else 5  # a policy's own statistics begin again
            assert found == {**expected, "averages_when_resumed": resumed}, f"{library}, rank {rank}"


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
    environment = {**warm_environment(), mpi.REPORTS: str(tmp_path)}
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
