"""The set-up of a session: checks and trials of all parts together, and the parts of its rounds."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_fed.attacks.adversary import Adversary
from pl_fed.clients.base import Client
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.data.module import FederatedData
from pl_fed.evaluation.client_sample import ClientSample
from pl_fed.evaluation.monitor import Monitor
from pl_fed.evaluation.objective_training import ObjectiveTraining
from pl_fed.nets.weights import fit_names, read_weights
from pl_fed.preflight.compression_rules import check_compression, warn_of_codec_memory
from pl_fed.preflight.memory_trial import warn_of_augmentation_memory
from pl_fed.preflight.net_trial import (
    check_default_parts,
    find_net_facts,
    find_own_reads,
    refuse_unknown_options,
    refuse_unusable_loss,
    try_attacks,
    try_features,
    warn_of_untrained_parameters,
)
from pl_fed.preflight.privacy_rules import check_privacy
from pl_fed.preflight.round_trial import try_round
from pl_fed.preflight.rules import (
    check_accumulation,
    check_attacks,
    check_class_counts,
    check_compared_parts,
    check_engine,
    check_group_counts,
    check_held_out_clients,
    check_mean,
    check_own_batches,
    check_predict,
    check_samples,
    check_server_step,
    check_upload_factors,
    check_validation_loss,
    check_votes,
    describe_unused_groups,
    warn_of_scaled_images,
    warn_of_unread_losses,
    warn_of_untrained_parts,
)
from pl_fed.preflight.step_facts import StepFacts
from pl_fed.preflight.step_rules import (
    describe_missing_loss,
    describe_reset_buffers,
    describe_shared_values,
    refuse_changes,
    refuse_shared_values,
)
from pl_fed.preflight.step_trial import explain_smallest_minibatch, find_step_facts
from pl_fed.preflight.trial import Trial
from pl_fed.random import key
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.central_evaluation import CentralEvaluation
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.federated_evaluation import FederatedEvaluation
from pl_fed.rounds.held_out_clients import HeldOutClients, HeldOutStates
from pl_fed.rounds.identity import check_equal_data, federation_identity
from pl_fed.rounds.privacy import RoundPrivacy, build_privacy
from pl_fed.rounds.round import RoundRunner
from pl_fed.rounds.session import Session
from pl_fed.rounds.settings import RunSettings
from pl_fed.rounds.upload_channel import UploadChannel
from pl_fed.state import keep_freed_memory
from pl_fed.tasks import LightningTask
from pl_fed.tasks.directions import describe_directions
from pl_fed.types import Population

if TYPE_CHECKING:
    from pl_fed.federation.federation import Federation


@dataclass(frozen=True)
class SessionSetup:
    """Set-up of a session: checks an algorithm and its data, and builds the parts of the rounds.

    Attributes:
        federation: The federation: the parts get its arguments.
        client: The algorithm.
        datamodule: The data.
        settings: The trainer's settings.
        previous: The previous session of the same client and the same clients' data; its states
            stay. ``None`` for a new one.
    """

    federation: "Federation"
    client: Client
    datamodule: FederatedData
    settings: RunSettings
    previous: Session | None = None

    def run(self, stage: str, loads: bool) -> Session:
        """Return a session after all checks.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
            loads: Whether the trainer loads a checkpoint after the setup.

        Raises:
            ValueError: As :meth:`Federation.setup`.
        """
        client, data = self.client, self.datamodule.clients
        if self.previous is None:
            self._begin(loads)
        trial = self._prepare_client()
        self._check(trial)
        session = self._build_session()
        if stage == "fit":
            session.states.forget_triggered_samples()
            self._try_parts(session, trial)
            if session.rounds.privacy is not None:
                session.rounds.privacy.plan(self.settings.rounds)
        client.check(data, client.population)
        if stage == "fit":
            keep_freed_memory()
        if stage == "fit" or session.trains_held_out:
            self._try_steps(session, trial)
        evaluator = session.evaluation.evaluator
        self.federation.byzantine_clients.set_net(evaluator.copy_global_model)
        return session

    # Preparations

    def _begin(self, loads: bool) -> None:
        """Set the weights at the start of a new session, and draw its Byzantine clients."""
        federation, data = self.federation, self.datamodule.clients
        processes = self.settings.processes
        if processes.size > 1:
            identity = federation_identity(self.client, data, federation.seed)
            check_equal_data(processes.gather_objects(identity))
        if federation.initial_model is not None and not loads:
            _set_weights(self.client, federation.initial_model)
        own_samples = None if federation.privacy is None else data.train.samples
        federation.byzantine_clients.setup(
            data.num_clients, data.num_classes, federation.seed, own_samples
        )

    def _prepare_client(self) -> Trial:
        """Set all that set-up sets in an algorithm and its task: settings, then facts.

        :meth:`_try_steps` adds facts about local steps: ``client.reads_own_weights``,
        ``client.draws_globally`` and ``client.reads_optimizer``.

        Returns:
            The algorithm with its samples, for further trials.
        """
        federation, client, data = self.federation, self.client, self.datamodule.clients
        systems = federation.systems
        cohort_varies = not federation.sampler.has_fixed_size or (
            systems is not None and systems.changes_cohorts
        )
        client.population = Population(
            data.num_clients,
            self._count_expected_uploads(data.num_clients),
            int(data.train.sizes.sum()),
            cohort_varies=cohort_varies,
        )
        client.keeps_optimizer_state = federation.engine.keep_optimizer_state
        client.compressor = federation.compression
        client.choose_task(data.targets, data.num_classes)
        task = client.task
        task.further_metrics, task.directions = federation.further_metrics, federation.directions
        if isinstance(task, LightningTask):
            task.entries = data.entries
        check_own_batches(client, data, federation.byzantine_clients.attacks_on_data)
        warn_of_scaled_images(client, data)
        trial = Trial(client, data, self.datamodule.augment, self.settings.local)
        facts = find_net_facts(trial)
        client.takes_integers = facts.takes_integers
        if isinstance(task, LightningTask):
            task.facts = facts.module
        else:
            task.averages_samples = facts.averages_samples
            task.changes_inputs = facts.changes_inputs
            task.mixes_samples = facts.mixes_samples
        return replace(trial, takes_integers=facts.takes_integers)

    def _count_expected_uploads(self, num_clients: int) -> int:
        """Return the expected number of uploads in a round, without late clients and dropouts.

        Raises:
            ValueError: If the server would wait for more uploads than the sampler draws clients.
        """
        systems = self.federation.systems
        drawn = self.federation.sampler.size_of_cohort(num_clients)
        if systems is None or systems.take_first is None:
            return drawn
        if systems.take_first > drawn:
            raise ValueError(
                "Expected argument `federation.systems.take_first` to be at most the number of"
                f" drawn clients, {drawn}, but got {systems.take_first}: set a larger"
                " `federation.sampler.cohort_size`."
            )
        return systems.take_first

    # Checks and trials

    def _check(self, trial: Trial) -> None:
        """Refuse an algorithm, data, attacks and aggregators that do not fit together."""
        federation, client, data = self.federation, trial.client, trial.data
        aggregator = federation.server.aggregator
        federation.directions.check(client.task.metric_names())
        Monitor.from_name(federation.monitor, client.task, client.count_classes(data))
        check_validation_loss(client, federation.monitor)
        check_class_counts(client, data)
        if federation.smoothing is not None:
            check_votes(client, data)
        check_predict(client)
        check_samples(data, aggregator, federation.evaluate_clients)
        check_group_counts(client, data, aggregator)
        if sentence := describe_unused_groups(client, data):
            rank_zero_info(sentence)
        check_held_out_clients(client, self.datamodule.held_out)
        check_mean(client, aggregator, federation.server.only_adds)
        check_upload_factors(client, aggregator)
        check_compared_parts(client, aggregator)
        warn_of_untrained_parts(client, aggregator)
        warn_of_unread_losses(federation.adversary.attack, aggregator)
        check_server_step(aggregator, federation.server.only_adds)
        if federation.compression is not None:
            check_compression(federation.compression, client, aggregator)
        try_features(trial)
        check_attacks(client, data, federation.byzantine_clients.attacks_on_data)
        if federation.privacy is not None:
            check_privacy(
                federation.privacy,
                self.datamodule,
                federation.sampler,
                aggregator,
                federation.adversary,
                federation.systems,
                trial,
            )

    def _try_parts(self, session: Session, trial: Trial) -> None:
        """Run the aggregator, the attacks and the engine on a few numbers before training."""
        rounds = session.rounds
        rounds.try_merge()
        rounds.server.warn_of_lost_memory()
        if sentence := rounds.describe_small_cohorts():
            rank_zero_info(sentence)
        if self.federation.privacy is None:  # which refuses such modules
            warn_of_augmentation_memory(trial)
        if (codec := self.federation.compression) is not None and trial.client.sent_layout:
            warn_of_codec_memory(codec, trial.client.sent_layout)
        try_attacks(trial, self.federation.byzantine_clients.attacks_on_data)
        check_accumulation(trial.client, trial.settings.batches_per_step)
        check_engine(trial.client, session.states.rule, trial.data, self.federation.engine.name)

    def _try_steps(self, session: Session, trial: Trial) -> None:
        """Try the local steps of the algorithm, and let the session expect their changes."""
        trial.client.reads_own_weights = find_own_reads(trial)
        refuse_unusable_loss(trial)
        check_default_parts(trial)
        warn_of_untrained_parameters(trial.client)
        refuse_unknown_options(trial.client)
        try_round(trial)
        facts = self._find_step_facts(trial, session.states.rule)
        trial.client.draws_globally = facts.draws_globally
        trial.client.reads_optimizer = facts.reads_optimizer
        session.rounds.local_training.watch.expect(facts)

    def _find_step_facts(self, trial: Trial, rule: BatchRule) -> StepFacts:
        """Return the changes by local steps; refuse any that passes from one client to the next."""
        facts = find_step_facts(trial, rule.batch_size)
        refuse_changes(facts)
        task, net = trial.client.task, type(trial.client.global_model).__name__
        if self.federation.privacy is not None:
            refuse_shared_values("local steps", net, facts.shared)
            if isinstance(task, LightningTask):
                refuse_shared_values("evaluation steps", net, task.facts.shared_values)
        if fault := explain_smallest_minibatch(trial, rule):
            if not self._leaves_out:
                raise ValueError(fault)
            rank_zero_warn(f"{fault} Without it, pl_fed leaves these clients out.")
        if sentence := describe_shared_values(facts):
            rank_zero_warn(sentence)
        directions = task.metric_directions()
        for sentence in (
            describe_directions(directions) if task.runs_steps and directions else None,
            describe_reset_buffers(facts),
            describe_missing_loss(net, task.has_loss("val"), bool(directions)),
        ):
            if sentence is not None:
                rank_zero_info(sentence)
        return facts

    # Parts

    @property
    def _leaves_out(self) -> bool:
        """Whether a client that raises an exception is left out; with privacy it always is.

        The end of a run would tell that the client took part.
        """
        federation = self.federation
        return federation.on_client_error == "leave_out" or federation.privacy is not None

    def _build_session(self) -> Session:
        """Return a new session, with the states of the previous session if there is one."""
        data, previous = self.datamodule.clients, self.previous
        # results of evaluations stay until the next one, unless the data are loaded again
        loads_again = previous is not None and data is not previous.states.loaded
        evaluated = None if loads_again else previous
        states = self._build_states()
        evaluation = self._build_evaluation(states, evaluated)
        rounds = self._build_rounds(states, evaluation)
        held_out = self._build_held_out(rounds, evaluated)
        self.datamodule.limit_validation(_list_sampled(evaluation, held_out))
        central = self._build_central(states, evaluation)
        return Session(self.client, self.datamodule, states, evaluation, rounds, central, held_out)

    def _build_states(self) -> ClientStates:
        """Return the clients' data and states: those of the previous session if there is one."""
        federation, settings, data = self.federation, self.settings, self.datamodule.clients
        rule, augment = settings.build_batch_rule(self.datamodule), self.datamodule.augment
        if self.previous is None:
            federation.server.reset()
            return ClientStates(
                self.client, data, federation.server, settings, federation.storage, rule, augment
            )
        states = self.previous.states
        states.renew(data, settings, rule, augment)
        return states

    def _build_evaluation(
        self, states: ClientStates, evaluated: Session | None
    ) -> FederatedEvaluation:
        """Return the evaluation of the clients, with the results of an earlier session, if any."""
        federation = self.federation
        return FederatedEvaluation(
            states,
            federation.byzantine_clients,
            self._build_adaptation(states, federation.byzantine_clients, federation.seed),
            federation.model_selection,
            federation.monitor,
            federation.untrained_models,
            self._draw_sample(states.loaded),
            federation.figures,
            federation.smoothing,
            federation.seed,
            before=None if evaluated is None else evaluated.evaluation,
        )

    def _build_rounds(self, states: ClientStates, evaluation: FederatedEvaluation) -> RoundRunner:
        """Return the rounds; they go on with the traffic and time of a previous session."""
        federation = self.federation
        before = None if self.previous is None else self.previous.rounds
        privacy = self._build_privacy(states)
        channel = None
        if federation.compression is not None:
            channel = UploadChannel(federation.compression, self.client, federation.seed)
        rounds = RoundRunner(
            states,
            self.datamodule,
            federation.sampler,
            federation.server,
            federation.byzantine_clients,
            federation.engine_choice,
            evaluation.evaluator,
            max_rejected=federation.max_rejected,
            seed=federation.seed,
            small_cohort=federation.small_cohort,
            privacy=privacy,
            leaves_out=self._leaves_out,
            systems=federation.systems,
            channel=channel,
            traffic=None if before is None else before.traffic,
        )
        if rounds.systems is not None and before is not None:
            rounds.systems.seconds = 0.0 if before.systems is None else before.systems.seconds
        return rounds

    def _build_central(
        self, states: ClientStates, evaluation: FederatedEvaluation
    ) -> CentralEvaluation | None:
        """Return the evaluation on the server's samples; ``None`` without samples or model."""
        data = self.datamodule.central_data
        if data is None:
            return None
        if "global" not in self.client.evaluated:
            rank_zero_info(
                f"pl_fed leaves out `data.central`: {type(self.client).__name__} has no global"
                " model to evaluate on it."
            )
            return None
        return CentralEvaluation(
            data,
            states,
            self.federation.byzantine_clients,
            evaluation.evaluator,
        )

    def _build_adaptation(
        self, states: ClientStates, byzantine_clients: ByzantineClients, seed: int
    ) -> ObjectiveTraining | None:
        """Return the training of personal models before an evaluation, or ``None`` without one.

        It uses the clients' training data, and the same minibatches before every evaluation.
        Therefore adapted models depend on the seed and the global model only, also after a resume.

        Raises:
            ValueError: If ``Client.adaptation`` trains another model.
        """
        client, objective = self.client, self.client.adaptation
        if objective is None:
            return None
        if objective.trained != ("personal",):
            raise ValueError(
                f"Expected `adaptation` of {type(client).__name__} to train the model personal"
                f" alone but got {', '.join(objective.trained) or 'none'}."
            )
        return ObjectiveTraining(
            client,
            objective,
            states.rule,
            self.settings.local,
            self.federation.engine_choice,
            key(seed, "adaptation"),
            byzantine_clients.poison,
            states.augment,
            place="the adaptation before an evaluation, {clients}",
            leaves_out=self._leaves_out,
        )

    def _draw_sample(self, data: ClientData) -> ClientSample | None:
        """Return the clients that validations evaluate; ``None`` for all clients."""
        evaluated = self.federation.evaluate_clients
        if evaluated is None:
            return None
        return ClientSample.draw(evaluated, data.val.sizes, self.federation.seed)

    def _build_held_out(
        self, rounds: RoundRunner, evaluated: Session | None
    ) -> HeldOutClients | None:
        """Return the evaluation of the held-out clients, or ``None`` if all clients train.

        Args:
            rounds: The rounds of the training clients.
            evaluated: The earlier session, if results of its held-out clients stay.
        """
        federation, data = self.federation, self.datamodule.held_out
        if data is None:
            return None
        before = None if evaluated is None else evaluated.held_out
        seed = key(federation.seed, "held-out clients")
        # a copy, whose state is not that of the rounds
        corruption = copy.deepcopy(federation.adversary.corruption)
        benign_clients = ByzantineClients(Adversary(corruption=corruption))
        benign_clients.setup(data.num_clients, data.num_classes, seed)
        states = HeldOutStates(rounds.states, data, federation.server, federation.storage)
        evaluation = FederatedEvaluation(
            states,
            benign_clients,
            self._build_adaptation(states, benign_clients, seed),
            federation.model_selection,
            federation.monitor,
            sample=self._draw_sample(data),
            figures=federation.figures,
            before=None if before is None else before.evaluation,
        )
        return HeldOutClients(
            states, evaluation, rounds.local_training, seed, federation.held_out_rounds
        )

    def _build_privacy(self, states: ClientStates) -> RoundPrivacy | None:
        """Return the privacy step; that of the previous session has spent a part of the budget."""
        federation = self.federation
        if federation.privacy is None:
            return None
        return build_privacy(
            federation.privacy,
            federation.sampler,
            states.loaded.num_clients,
            federation.seed,
            states.processes.select_first,
            spent=None if self.previous is None else self.previous.rounds.privacy,
        )


def _list_sampled(
    evaluation: FederatedEvaluation, held_out: HeldOutClients | None
) -> Tensor | None:
    """Return the ids of the clients that validations evaluate; ``None`` for all clients."""
    if evaluation.sample is None:
        return None
    ids = evaluation.list_evaluated_clients("val")
    if held_out is None:
        return ids
    num_training = evaluation.states.loaded.num_clients
    return torch.cat([ids, num_training + held_out.evaluation.list_evaluated_clients("val")])


def _set_weights(client: Client, path: Path) -> None:
    """Give all models of an algorithm the weights in a file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has no weights, or those of another net.
    """
    weights = fit_names(read_weights(path), client.global_model, path)
    for name in client.models:
        client.model(name).load_state_dict(weights)
    rank_zero_info(f"The models begin with the weights in {path}.")
