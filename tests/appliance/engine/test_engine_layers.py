from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from appliance.engine import layers


@pytest.mark.parametrize("rows", [1, 3, 4, 40, 41, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_project_equals_the_definition_for_every_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((rows, 24), (36, 24), (36,)))
    expected = (x.double() @ weight.double().t() + bias.double()).to(torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(layers.project(x, weight, bias).float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        layers.project(x, weight).float(), expected - bias.float(), rtol=tolerance, atol=2 * tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_equals_the_reference(dtype: torch.dtype) -> None:
    reference = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.add_(torch.randn(48).to(dtype))
    x = torch.randn(7, 48, dtype=dtype) * 3
    found = layers.rms_norm(x, reference.weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, reference(x), rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6 if dtype == torch.float32 else 0
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_gated_silu_equals_the_definition(transposed: bool) -> None:
    x = torch.randn(20, 5).t() if transposed else torch.randn(5, 20)
    gate, up = x[:, :10].clone(), x[:, 10:].clone()
    torch.testing.assert_close(layers.gated_silu(x), gate * torch.sigmoid(gate) * up)
