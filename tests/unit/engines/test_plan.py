import torch

from consilience.engines.plan import Plan, chunk_sizes, compiled_sizes, finalists

CREWS = [(1, 1), (1, 2), (2, 1)]


def shapes(plans):
    return [(plan.chunk, plan.workers, plan.threads) for _, plan in plans]


def test_the_fastest_of_each_kind_goes_on_trial_and_the_slow_ones_do_not():
    times = {(1, 1): 1.0, (1, 2): 0.9, (4, 1): 0.5, (4, 2): 0.4}
    assert shapes(finalists(times, CREWS, clients=8)) == [(4, 2, 1)]
    assert shapes(finalists(times, CREWS[:2], clients=8)) == [(4, 1, 2)]
    near = {(1, 1): 1.0, (4, 1): 0.9}
    assert shapes(finalists(near, [(1, 1), (2, 1)], clients=8)) == [(4, 2, 1), (1, 2, 1)]


def test_one_thread_is_enough_where_a_second_one_only_costs():
    assert shapes(finalists({(4, 1): 1.0, (4, 2): 3.0}, CREWS[:2], clients=4)) == [(4, 1, 1)]


def test_a_chunk_that_leaves_a_remainder_pays_for_it():
    times = {(1, 1): 10.0, (4, 1): 1.0, (5, 1): 1.05}
    assert finalists(times, CREWS[:1], clients=5)[0][1].chunk == 5
    assert finalists(times, CREWS[:1], clients=8)[0][1].chunk == 4


def test_chunks_to_time_reach_from_one_to_what_memory_allows():
    assert chunk_sizes(clients=10, workers=2, most=10) == [1, 4, 5, 10]
    assert chunk_sizes(clients=500, workers=2, most=20) == [1, 4, 16, 20]
    assert chunk_sizes(clients=1, workers=1, most=1) == [1]


def test_graphs_are_compiled_for_whole_chunks_for_the_rest_and_for_those_that_are_left():
    equal, unequal = torch.full((10,), 6), torch.arange(10)
    assert compiled_sizes(Plan(1, workers=2), equal) == [1]
    assert compiled_sizes(Plan(4, workers=2), equal) == [4, 1]
    assert compiled_sizes(Plan(20, workers=2), equal) == [5]
    assert compiled_sizes(Plan(5, workers=2), unequal) == [5, 3, 2, 1]


def test_a_plan_says_what_it_does():
    assert str(Plan(1)) == "one by one (given)"
    assert str(Plan(4, threads=1)) == "vectorised, chunks of 4, one thread (given)"
    assert str(Plan(8, 2, 1, True, "measured")) == "vectorised, chunks of 8, 2 workers, compiled (measured)"
