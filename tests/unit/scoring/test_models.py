"""Models in files: what is read computes what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from horovod_runner.run.pickling import pickle_for_ranks

torch = pytest.importorskip("torch")


def test_a_module_with_parametrizations_travels(tmp_path: Path) -> None:
    import cloudpickle
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    from horovod_runner.data.scoring.models.torch import TorchKind

    net = torch.nn.Sequential(
        weight_norm(torch.nn.Linear(3, 4)), spectral_norm(torch.nn.Linear(4, 2))
    )
    net.eval()
    x = np.ones((5, 3), "float32")
    expected = net(torch.from_numpy(x)).detach().numpy()
    on_a_rank = cloudpickle.loads(pickle_for_ranks(net))
    np.testing.assert_array_equal(on_a_rank(torch.from_numpy(x)).detach(), expected)
    assert on_a_rank.state_dict().keys() == net.state_dict().keys()
    TorchKind("module").write(net, tmp_path / "net", ())
    np.testing.assert_array_equal(
        TorchKind("module").load(tmp_path / "net", "cpu")({"x": x}), expected
    )
