"""Lists the mutants: small edits, each of which puts a defect back, most of them from docs/architecture.md, section 11.

A mutant resembles the mistake of a hurried change: the program still starts, trains and mostly works. The text that an
edit replaces must be in its file exactly once. If the code has changed, the mutant is therefore an error, and is not
reported as a defect that the simulator missed.
"""

from __future__ import annotations

from typing import Final

from exchange_table import EXCHANGE_MUTANTS
from mutant import Mutant

#: Scenarios: the test suite's own, and scenarios of this folder for defects that the suite's scenario does not
#: exercise.
SUITE: Final = "simulation.scenarios:scenario"
TROUBLE: Final = "scenarios:trouble"
ASKED_AGAIN: Final = "scenarios:asked_again"
LATENESS: Final = "scenarios:lateness"
SLOW_WORDS: Final = "scenarios:slow_words"
FAREWELL: Final = "scenarios:farewell"
LEAVING: Final = "scenarios:leaving"
SUBGROUP: Final = "scenarios:subgroup"
ABSENT: Final = "scenarios:absent"
AVERAGES: Final = "simulation.deadline_scenarios:averages"
ONE_SIDED: Final = "simulation.one_sided_scenarios:scenario"
ISLANDS: Final = "simulation.island_scenarios:scenario"
POPULATION_TRAINING: Final = "simulation.population_training_scenarios:scenario"
READING: Final = "simulation.read_scenarios:scenario"
SHARDED: Final = "simulation.sharded_replica_scenarios:scenario"


MUTANTS: Final = (
    Mutant(
        "never-applied",
        1,
        "with momentum the new weights are computed and not written back",
        "asyncdist/tensors/flat_state.py",
        "        own.copy_(mixed(before, other, momentum))",
        "        own = mixed(before, other, momentum).to(own.dtype)",
        SUITE,
    ),
    Mutant(
        "own-rank-unheard",
        2,
        "the coordinator does not send to its own rank",
        "protocols/selective/coordinator.py",
        "            dest, number, message = send\n",
        "            dest, number, message = send\n"
        "            if dest == self._services.rank:\n                continue\n",
    ),
    Mutant(
        "never-done",
        3,
        "a send that waits for its receiver is polled, and never turns true",
        "asyncdist/simulation/fabric.py",
        "        if not message.done:\n            message.done = True\n",
        "        if not message.done and message.eager:\n            message.done = True\n",
        SUITE,
    ),
    Mutant(
        "send-request-dropped",
        4,
        "nobody keeps the request of send_nowait",
        "asyncdist/messaging/channels.py",
        "        self._engine.watch(request, self._sending(dest), on_left)",
        "        on_left(None)",
        FAREWELL,
    ),
    Mutant(
        "stream-forgotten-with-its-slot",
        4,
        "a donor forgets a stream under way when an earlier one with the same slot ends, and gives its memory back",
        "protocols/parameter_stream/server.py",
        "            del offer.streams[stream]\n",
        "            slot = offer.streams[stream]\n"
        "            for other in [other for other, taken in offer.streams.items() if taken == slot]:\n"
        "                del offer.streams[other]\n",
        ASKED_AGAIN,
    ),
    Mutant(
        "buffer-freed-early",
        4,
        "a snapshot is given back while chunks of it are under way",
        "asyncdist/messaging/outbound_streams.py",
        "            complete = self.cut()\n"
        "        await self._until(lambda: self.under_way_count == 0, is_of_request=True)\n",
        "            complete = self.cut()\n",
        LATENESS,
    ),
    Mutant(
        "old-model-object",
        5,
        "the model's tensors are looked up once, before training replaces some",
        "asyncdist/tensors/flat_state.py",
        "        tensors = [found[place] for place in self._firsts]\n",
        '        tensors = [self.__dict__.setdefault("_found", found)[place] for place in self._firsts]\n',
    ),
    Mutant(
        "weights-of-others",
        6,
        "weighted mean: a donor gets the weight of another, often the best that of the worst",
        "protocols/selective/selection.py",
        "    candidates.sort()\n    weights = averaging_weights(\n        metrics, candidates, ",
        "    judged = candidates[:]\n    candidates.sort()\n"
        "    weights = averaging_weights(\n        metrics, judged, ",
    ),
    Mutant(
        "worst-weighs-most",
        6,
        'weighted mean of losses (metric_mode="min") weighs the larger ones more',
        "protocols/selective/selection.py",
        "averaging_strategy=rules.averaging_strategy, metric_mode=rules.metric_mode\n",
        "averaging_strategy=rules.averaging_strategy\n",
    ),
    Mutant(
        "quorum-of-all",
        7,
        "the quorum counts members that have left, so no round is decided without them",
        "protocols/selective/roster.py",
        "        needed = (self._quorum * self.live_count).to_integral_value(ROUND_CEILING)",
        "        needed = (self._quorum * len(self.members)).to_integral_value(ROUND_CEILING)",
        LEAVING,
    ),
    Mutant(
        "incomplete-round-leaks",
        7,
        "the accumulator of an average that is not applied is never given back",
        "protocols/selective/roles/exchange.py",
        "            self.task.cancel()\n        self.close()\n        if self.average is not None:\n"
        "            self._release(self.average)\n",
        "            self.task.cancel()\n        self.close()\n",
        SUITE,
    ),
    Mutant(
        "slot-reused",
        8,
        "a stream's slot is free again before the sender has answered: its late chunks land in the next round",
        "asyncdist/messaging/streams.py",
        "            self._slots.discarding_count += 1\n",
        "            self._slots.discarding_count += 1\n            self._slots.give_back(self._peer, self.slot)\n",
        LATENESS,
    ),
    Mutant(
        "any-round",
        8,
        "a donor answers a grant of one round with its snapshot of another",
        "protocols/parameter_stream/server.py",
        "            if offer.answers(round, request) and not offer.withdrawn:",
        "            if offer.answers(offer.round, request) and not offer.withdrawn:",
        SLOW_WORDS,
    ),
    Mutant(
        "message-per-tensor",
        9,
        "one message per parameter in place of one flat tensor",
        "protocols/parameter_stream/messages.py",
        "    parts = list(buffers.averaged().items())\n",
        "    parts = zip(buffers.entries, buffers.views, strict=True)\n"
        "    parts = [(entry.dtype, view.view(-1)) for entry, view in parts if entry.averaged]\n",
    ),
    Mutant(
        "float32-iterations",
        10,
        "the iteration of a report travels as float32",
        "protocols/selective/leadership.py",
        " = report = Report(iteration, value, ",
        ' = report = Report(int(__import__("torch").tensor(float(iteration))), value, ',
    ),
    Mutant(
        "float32-staleness",
        10,
        "a donor's iteration travels as float32",
        "protocols/selective/roles/donor.py",
        "        return Copy(round, snapshot, iteration, ",
        '        return Copy(round, snapshot, int(__import__("torch").tensor(float(iteration))), ',
    ),
    Mutant(
        "ratio-zero-replaces",
        11,
        "replacement_ratio 0 replaces one rank",
        "protocols/ranking.py",
        "    if participant_count < 2 or replacement_ratio == 0:",
        "    if participant_count < 2:",
    ),
    Mutant(
        "ratio-one-takes-all",
        11,
        "replacement_ratio 1 leaves no donor",
        "protocols/ranking.py",
        "    return min(max(int(exact.to_integral_value(ROUND_HALF_UP)), 1), participant_count - 1)",
        "    return min(max(int(exact.to_integral_value(ROUND_HALF_UP)), 1), participant_count)",
    ),
    Mutant(
        "buffers-lost",
        12,
        "the state has no buffers: averaged weights meet running statistics of another model",
        "asyncdist/tensors/model_tensors.py",
        "    for key, buffer in module._buffers.items():",
        "    for key, buffer in {}.items():",
    ),
    Mutant(
        "integers-of-any-donor",
        12,
        "integer entries come from the first donor, not from the best",
        "protocols/selective/roles/exchange.py",
        "            best=best,\n            round=self.round,",
        "            best=donors[0],\n            round=self.round,",
        SUITE,
    ),
    Mutant(
        "optimizer-state-lost",
        12,
        "a rank with a model_builder loses the optimizer's state at each average",
        "protocols/options.py",
        '        return self.optimizer_state == "reset" or self.makes_fresh_weights',
        '        return self.optimizer_state == "reset" or self.model_builder is not None',
        SUITE,
    ),
    Mutant(
        "infinity-is-best",
        13,
        "a metric that diverged to infinity is taken as good",
        "protocols/ranking.py",
        "    finite = sorted([rank for rank, metric in metrics.items() if math.isfinite(metric)])",
        "    finite = sorted([rank for rank, metric in metrics.items() if not math.isnan(metric)])",
    ),
    Mutant(
        "nan-donates",
        13,
        "a rank whose metric is NaN gives its weights to others",
        "protocols/selective/selection.py",
        "    candidates = [rank for rank in order[count:] if math.isfinite(metrics[rank])]",
        "    candidates = list(order[count:])",
    ),
    Mutant(
        "any-version",
        14,
        "a reader gets what lies in the slot, whatever version it asked for",
        "asyncdist/collectives/one_sided.py",
        "        return not self._closed and version > self.first and (version == self.version or is_previous)",
        "        return not self._closed and self.first < version <= self.version",
        ONE_SIDED,
    ),
    Mutant(
        "slot-written-while-read",
        14,
        "a new version is written into the slot that a reader is being sent: two versions in one average",
        "asyncdist/collectives/one_sided.py",
        "answer.version == version - 2 and not answer.stream.has_left",
        "False",
        ONE_SIDED,
    ),
    Mutant(
        "published-in-every-step",
        14,
        "the whole model is copied in every step, and not once per cadence",
        "protocols/one_sided/policy.py",
        "self._read_new_metric(local_metric) if self._is_due else None\n",
        "self._read_new_metric(local_metric)\n",
        ONE_SIDED,
    ),
    Mutant(
        "world-size-divisor",
        15,
        "the synchronous average divides by the world's size",
        "asyncdist/collectives/algorithms/by_messages.py",
        "            work = fold([*receive])",
        "            work = fold([*receive]) * (group.size / self._engine.transport.size)",
        SUBGROUP,
    ),
    Mutant(
        "overtaking-network",
        "network",
        "messages of one source and tag overtake each other on their way",
        "asyncdist/simulation/fabric.py",
        "        if arrival <= last:  # messages of one (source, tag) never overtake each other\n"
        "            arrival = math.nextafter(last, math.inf)\n",
        "",
        TROUBLE,
    ),
    Mutant(
        "overtaking-receive",
        "network",
        "a wildcard receive takes the newest message of a source that has several waiting",
        "asyncdist/simulation/arrivals.py",
        "        message = of_source.popleft()",
        "        message = of_source.popleft() if wanted != ANY_SOURCE else of_source.pop()",
        TROUBLE,
    ),
    Mutant(
        "part-left-out",
        "route",
        "the part of a reducer that was left out of a sharded round is asked of nobody",
        "protocols/selective/roles/exchange.py",
        "                if not is_whole:\n",
        "                if not is_whole and reducer in frozen.reducers:\n",
        SUITE,
    ),
    Mutant(
        "exact-part-of-another",
        "route",
        "a reducer takes integers from the best donor of the frozen round without having asked that one for them",
        "protocols/selective/roles/reducer.py",
        "        if exact and donor != state.assign.best:",
        "        if False:",
        SUITE,
    ),
    Mutant(
        "parts-never-finished",
        "route",
        "a reducer whose round ends forgets the donors that it has asked: their slots stay taken",
        "protocols/selective/roles/reducer.py",
        "        while state.asked:\n            self._finish(state, next(iter(state.asked)))\n",
        "",
        SUITE,
    ),
    Mutant(
        "given-up-after-go",
        "deadline",
        "a member whose time is up when the leader has said go leaves the others alone in the average",
        "asyncdist/collectives/agreed_start.py",
        "        elif not self._has_joined:\n            self._agreements.decline(self.meeting)\n",
        "        elif True:\n            self._agreements.decline(self.meeting)\n",
        AVERAGES,
    ),
    Mutant(
        "dropped-deadline",
        "deadline",
        "waiting for a condition has no timer: the deadline is judged when something else happens",
        "asyncdist/messaging/engine.py",
        "                if deadline is not None:\n                    self._alarms",
        "                if False:\n                    self._alarms",
        ABSENT,
    ),
    Mutant(
        "dropped-stream-deadline",
        "deadline",
        "a replacer waits for a donor's chunks without its deadline",
        "asyncdist/messaging/streams.py",
        "        await self._until(functools.partial(self._arrived.__contains__, index), deadline)",
        "        await self._until(functools.partial(self._arrived.__contains__, index))",
        LATENESS,
    ),
    Mutant(
        "guest-stays",
        "island",
        "a rank of another island that has given to a round stays among the members when the round has ended",
        "protocols/selective/islands/migrants.py",
        "        for rank in self.named:\n            del self._members[rank]\n",
        "",
        ISLANDS,
    ),
    Mutant(
        "visit-after-leaving",
        "island",
        "a rank that leaves the policy accepts invitations of other islands still",
        "protocols/selective/islands/migration.py",
        "        if self._is_leaving:\n            return False\n",
        "",
        ISLANDS,
    ),
    Mutant(
        "rounds-of-two-islands-mixed",
        "island",
        "the snapshot of a visit is taken for the round of that number in the rank's own island",
        "protocols/selective/roles/donor.py",
        "copy.snapshot.by_name(), self._island)",
        "copy.snapshot.by_name())",
        ISLANDS,
    ),
    Mutant(
        "read-of-a-snapshot-for-a-mean",
        "reading",
        "a reducer that is asked where its part of the mean lies is asked for its own snapshot",
        "protocols/parameter_stream/neighbours.py",
        "LocateRequest(self._last_slot, *(mean_of or ()))",
        "LocateRequest(self._last_slot)",
        READING,
    ),
    Mutant(
        "read-at-wrong-element",
        "reading",
        "a piece of a snapshot is read so many bytes behind its beginning as it should be elements",
        "protocols/parameter_stream/neighbours.py",
        "self._tensors[number] + first * into.itemsize,",
        "self._tensors[number] + first,",
        READING,
    ),
    Mutant(
        "read-of-one-tensor",
        "reading",
        "all tensors of a snapshot are read from the first one of it",
        "protocols/parameter_stream/neighbours.py",
        "self._tensors[number] + first * into.itemsize,",
        "self._tensors[0] + first * into.itemsize,",
        READING,
    ),
    Mutant(
        "part-applied-before-the-rest",
        "sharded replica",
        "a leader applies its part of an average before the other parts are whole",
        "protocols/replica_averaging/shards.py",
        "        elif member.state is State.COMPLETE and self._are_complete(followers):\n",
        "        elif member.state is State.COMPLETE:\n",
        SHARDED,
    ),
    Mutant(
        "part-given-without-the-rest",
        "sharded replica",
        "a rank gives its part of a snapshot though another part of it is not finite",
        "protocols/replica_averaging/shards.py",
        "            self._opened.conclude(fault)\n",
        "            self._opened.conclude(await self._opened.fault_of_copy())\n",
        SHARDED,
    ),
    Mutant(
        "part-recovered-alone",
        "sharded replica",
        "what is not finite on one rank of a replica is made good there alone",
        "protocols/replica_averaging/shards.py",
        "roles.apply(application, self.iteration, decision.nonfinite)",
        "roles.apply(application, self.iteration)",
        SHARDED,
    ),
    Mutant(
        "state-of-an-earlier-step",
        "population training",
        "the optimizer's state is that of the donor's previous snapshot",
        "protocols/selective/roles/donor.py",
        "        self._states.offer(round, state)\n",
        "        self._states.offer(round, self._last_state if hasattr(self, '_last_state') else state)\n"
        "        self._last_state = state\n",
        POPULATION_TRAINING,
    ),
    Mutant(
        "moments-made-narrow",
        "population training",
        "float32 moments of bfloat16 weights are rounded to bfloat16",
        "asyncdist/tensors/optimizers/loading.py",
        "now.dtype != value.dtype",
        "now.dtype == value.dtype",
        POPULATION_TRAINING,
    ),
    Mutant(
        "rate-left-to-the-group",
        "population training",
        "new hyperparameters are known to the policy, and the optimizer trains on with the old ones",
        "protocols/population_training/policy.py",
        "self._settings.write(prepared.values)",
        "self._settings.write({})",
        POPULATION_TRAINING,
    ),
    *EXCHANGE_MUTANTS,
)

#: Defects without a mutant, and why.
LEFT_OUT: Final[dict[int, str]] = {}
