"""The toy data of mask learning have the published distribution, and follow their seed."""

import torch

from partbench.paper.toy import input_selection


def test_the_toy_data_are_class_means_plus_standard_normal_noise():
    whole = input_selection(20000, test=10000, seed=1, informative=3, spurious=2)
    for (x, y), n in ((whole.train, 20000), (whole.test, 10000)):
        assert x.shape == (n, 5) and y.bincount().tolist() == [n // 2, n // 2]
        noise = x - y[:, None] * torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
        torch.testing.assert_close(noise.mean(0), torch.zeros(5), rtol=0, atol=0.04)
        torch.testing.assert_close(noise.T.cov(), torch.eye(5), rtol=0, atol=0.05)
        assert abs(torch.corrcoef(torch.stack([y.float(), noise[:, 0]]))[0, 1]) < 0.04


def test_the_toy_test_set_is_the_same_for_any_number_of_training_examples():
    small, large = input_selection(10), input_selection(3000)
    assert torch.equal(small.test[0], large.test[0]) and torch.equal(small.test[1], large.test[1])
    assert not torch.equal(small.test[0], input_selection(10, seed=1).test[0])
