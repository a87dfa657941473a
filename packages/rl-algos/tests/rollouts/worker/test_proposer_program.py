import asyncio

import pytest
from test_program import PROMPT, ScriptedClient, said

from rl_algos.rollouts.worker.program import ProposerSolverProgram
from rl_algos.rollouts.worker.programs import argument_problem
from rl_core.rollouts.environment import StepResult


class Solvers(ScriptedClient):
    """Solvers that say their number, of whom some are right."""

    def __init__(self, right, *, posed="4", proposal=None):
        super().__init__([], [])
        self.right, self.posed, self.proposal = set(right), posed, proposal
        self.draws: list[int | None] = []

    async def generate(self, token_ids, sampling=None, *, draw=None, agent=""):
        await asyncio.sleep(0)
        self.contexts.append(token_ids.tolist())
        self.draws.append(draw)
        return said(9) if draw is None else said(20 + draw)

    async def step(self, conversation):
        self.seen.append(conversation)
        if conversation.agent == "":
            observation = ({"role": "user", "content": self.posed},)
            return self.proposal or StepResult(
                done=False, observation=observation, agent="proposer", next_agent="solver", reward=0.5
            )
        number = int(conversation.completion_ids[0]) - 20
        return StepResult(reward=float(number in self.right), agent="solver")


def play(client, **args):
    program = ProposerSolverProgram(max_turns=1, max_tokens=100, **args)
    return asyncio.run(program.run(PROMPT, client))


@pytest.mark.parametrize(("right", "learnable"), [((), 0.0), ((0,), 0.75), ((1, 3), 1.0), ((0, 1, 2, 3), 0.0)])
def test_a_proposer_earns_most_for_problems_that_half_of_the_solvers_solve(right, learnable):
    proposer, *solvers = play(Solvers(right))
    assert proposer.agent == "proposer"
    assert dict(proposer.rewards) == {"reward": 0.5 + learnable, "solved": len(right) / 4}
    assert [rollout.reward for rollout in solvers] == [float(number in right) for number in range(4)]


def test_solvers_see_the_problem_only_and_draw_for_themselves():
    client = Solvers([0])
    _, *solvers = play(client, num_solvers=3)
    assert client.contexts == [[1, 2, 3], [61], [61], [61]]
    assert client.draws == [None, 0, 1, 2]
    assert [rollout.tokens.tolist() for rollout in solvers] == [[61, 20], [61, 21], [61, 22]]
    assert len({each.id for each in client.seen}) == 4
    assert [dict(each.info) for each in client.seen[1:]] == [{"goal": 9, "problem": "i"}] * 3


def test_solvers_of_equal_problems_are_peers_and_others_are_not():
    peers = [{each.peers for each in play(Solvers([], posed=posed))[1:]} for posed in ("4", "4", "5")]
    assert peers[0] == peers[1] != peers[2]
    assert all(len(each) == 1 for each in peers)
    assert play(Solvers([]))[0].peers == ""


def test_a_turn_that_is_not_a_problem_is_the_proposers_rollout_alone():
    client = Solvers([], proposal=StepResult(reward=-1.0, agent="proposer"))
    rollout = play(client)
    assert (rollout.agent, rollout.reward, len(client.seen)) == ("proposer", -1.0, 1)


def test_an_environment_that_names_no_solver_is_refused():
    observation = ({"role": "user", "content": "4"},)
    with pytest.raises(ValueError, match="named no solver"):
        play(Solvers([], proposal=StepResult(done=False, observation=observation, agent="proposer")))


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("proposer_solver", {"num_solvers": 2}, ""),
        ("proposer_solver", {"num_solvers": 1}, "num_solvers must be at least 2, got 1"),
        ("proposer_solver", {"solvers": 3}, "solvers: the program proposer_solver takes num_solvers, first_agent"),
        ("multi_turn", {"num_solvers": 2}, "num_solvers: the program multi_turn takes first_agent"),
        ("mine.py:Program", {"anything": 1}, ""),
    ],
)
def test_arguments_of_installed_programs_are_checked(name, args, said):
    assert argument_problem(name, args) == said
