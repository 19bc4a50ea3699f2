"""Run the recipes of test_any_device.py where torch's default device is the group's.

So it is after launch(device="cuda"). What the host reads must then be made on the host on purpose:
a table that follows the default device has no values here, and raises where it is read.
"""

import pytest
import torch

from tests.training.test_any_device import (  # noqa: F401
    test_a_pipeline_runs_on_the_device_of_its_stages,
    test_a_sharded_model_is_made_where_it_is_asked_for,
    test_all_axes_train_in_every_sampled_layout,
    test_collectives_answer_on_the_device_of_what_they_get,
    test_context_parallel_in_every_form_and_placement,
    test_every_wrapper_trains,
    test_saved_activations_go_to_the_host_and_come_back,
    test_serving_answers_where_the_model_is,
    test_the_model_trains_and_generates,
    test_the_pages_of_zero_and_context_parallel,
    test_the_trainer_trains,
)


@pytest.fixture(autouse=True)
def default_device():
    with torch.device("meta"):
        yield
