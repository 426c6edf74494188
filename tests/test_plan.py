from consilience.engines.plan import Plan, cheapest, chunk_sizes


def test_the_fastest_plan_wins():
    times = {(1, 1): 1.0, (1, 2): 1.2, (4, 1): 0.5, (4, 2): 0.9}
    chosen = cheapest(times, clients=8, compile=False)
    assert (chosen.chunk, chosen.workers) == (4, 2)


def test_a_chunk_that_leaves_a_remainder_pays_for_it():
    times = {(1, 1): 10.0, (4, 1): 1.0, (5, 1): 1.05}
    assert cheapest(times, clients=5, compile=False).chunk == 5
    assert cheapest(times, clients=8, compile=False).chunk == 4


def test_chunks_to_time_reach_from_one_to_what_memory_allows():
    assert chunk_sizes(clients=10, workers=2, most=10) == [1, 4, 5, 10]
    assert chunk_sizes(clients=500, workers=2, most=20) == [1, 4, 16, 20]
    assert chunk_sizes(clients=1, workers=1, most=1) == [1]


def test_a_plan_says_what_it_does():
    assert str(Plan(1)) == "one by one (given)"
    assert str(Plan(8, 2, True, "measured")) == "vectorised, chunks of 8, 2 workers, compiled (measured)"
