"""With how many ranks a run may go on, as the launcher judges it."""

from __future__ import annotations

import pytest

from launch.recipe import at_world_size, load_recipe, world_sizes_allowed
from r4090c.errors import UsageError


def test_another_number_of_ranks_is_judged_as_train_does() -> None:
    tiny = load_recipe("tiny")  # 2 sequences × 2 accumulated
    assert [ranks for ranks in range(1, 9) if world_sizes_allowed(tiny, ranks, 2) is None] == [1, 2, 4, 8]
    assert world_sizes_allowed(tiny, 3, 2) == "8 sequences a step: 3 ranks of micro_batch 1 (expected a multiple of 3)"
    fixed = load_recipe("tiny", ["elastic=false"])
    assert world_sizes_allowed(fixed, 2, 2) is None
    assert world_sizes_allowed(fixed, 1, 2) == "its checkpoint is of 2 ranks, and the recipe says elastic: false"
    quantized = load_recipe("tiny", ["optimizer.name=adamw8bit"])
    assert world_sizes_allowed(quantized, 2, 2) is None
    assert "8-bit moments of adamw8bit cannot be divided anew" in str(world_sizes_allowed(quantized, 1, 2))
    before = {key: value for key, value in tiny.items() if key != "elastic"}  # as runs of older versions keep it
    assert world_sizes_allowed(before, 1, 2) is None


def test_the_global_batch_stays_from_one_number_of_ranks_to_the_next() -> None:
    def told(recipe: dict[str, object]) -> tuple[object, ...]:
        return recipe["micro_batch"], recipe["gradient_accumulation"], recipe["global_batch"]

    tiny = load_recipe("tiny")
    assert told(at_world_size(tiny, 2, 2)) == (2, 2, 0)
    alone = at_world_size(tiny, 1, 2)
    assert told(alone) == (2, 4, 8)
    assert told(at_world_size(alone, 4, 1)) == (2, 1, 8)
    eight = at_world_size(alone, 8, 1)
    assert told(eight) == (1, 1, 8)
    assert told(at_world_size(eight, 2, 8)) == (1, 4, 8)  # it does not grow again
    assert tiny["global_batch"] == 0
    auto = load_recipe("tiny", ["micro_batch=auto", "global_batch=12"])
    assert told(at_world_size(auto, 3, 2)) == ("auto", 2, 12)
    with pytest.raises(UsageError, match="12 sequences a step: 5 ranks"):
        at_world_size(auto, 5, 2)
