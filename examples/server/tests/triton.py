"""NVIDIA's Triton client, unchanged, against the example server: python triton.py ADDR:PORT

Needs tritonclient[http]. Prints what it did; any difference is an AssertionError.
"""

import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException


def tensor(name, array, binary):
    kind = {np.dtype("float32"): "FP32", np.dtype("uint32"): "UINT32", np.dtype("int64"): "INT64"}
    given = triton.InferInput(name, list(array.shape), kind[array.dtype])
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def refused(client, what, model, inputs, **more):
    try:
        client.infer(model, inputs, **more)
    except InferenceServerException as error:
        assert error.status() in ("Status.INVALID_ARGUMENT", "400", "404", "422"), error.status()
        assert isinstance(error.message(), str) and len(error.message()) > 10, error.message()
        return
    raise AssertionError(f"{what} was not refused")


def embedding(tokens):
    """By the formula, in double precision."""
    i, j = tokens.astype(np.float64)[:, None], np.arange(64.0)
    mean = (((i * 31 + j * 17 + i * j) % 101) / 101 - 0.5).mean(axis=0)
    return mean / np.linalg.norm(mean)


def main(address):
    client = triton.InferenceServerClient(address, concurrency=8)
    assert client.is_server_live() and client.is_server_ready()
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    for model in ("matmul", "embed"):
        assert client.is_model_ready(model) and client.is_model_ready(model, "1")
        assert client.get_model_metadata(model)["name"] == model
    assert not client.is_model_ready("nothing")
    names = [each["name"] for each in client.get_model_metadata("matmul")["inputs"]]
    assert names == ["a", "b"], names

    random = np.random.default_rng(1)
    a = random.integers(-16, 17, (37, 200)).astype(np.float32) / 4
    b = random.integers(-16, 17, (200, 53)).astype(np.float32) / 4
    tokens = random.integers(0, 4096, 100).astype(np.uint32)
    asked = 0
    for sent in (True, False):
        for output in (None, True, False):
            inputs = [tensor("b", b, sent), tensor("a", a, not sent)]  # in any order
            outputs = output if output is None else [triton.InferRequestedOutput("c", binary_data=output)]
            result = client.infer("matmul", inputs, outputs=outputs, request_id="seven")
            assert np.array_equal(result.as_numpy("c"), a @ b)
            assert result.get_response()["id"] == "seven"
            outputs = output if output is None else [triton.InferRequestedOutput("embedding", binary_data=output)]
            result = client.infer("embed", [tensor("tokens", tokens, sent)], model_version="1", outputs=outputs)
            assert np.allclose(result.as_numpy("embedding"), embedding(tokens), atol=1e-4)
            asked += 2

    pending = [client.async_infer("embed", [tensor("tokens", tokens[:n], True)]) for n in range(1, 65)]
    for n, call in enumerate(pending, 1):
        assert np.allclose(call.get_result().as_numpy("embedding"), embedding(tokens[:n]), atol=1e-4)

    big = np.float32([[3e38]])
    result = client.infer("matmul", [tensor("a", big, True), tensor("b", big, True)])
    assert np.isinf(result.as_numpy("c")).all()
    in_json = [triton.InferRequestedOutput("c", binary_data=False)]
    refused(client, "infinity in JSON", "matmul", [tensor("a", big, True), tensor("b", big, True)], outputs=in_json)
    refused(client, "a missing input", "matmul", [tensor("a", a, True)])
    refused(client, "matrices that do not fit", "matmul", [tensor("a", a, True), tensor("b", a, True)])
    refused(client, "another type", "embed", [tensor("tokens", tokens.astype(np.int64), True)])
    refused(client, "an unknown output", "embed", [tensor("tokens", tokens, True)], outputs=[triton.InferRequestedOutput("x")])
    refused(client, "a token out of range", "embed", [tensor("tokens", np.uint32([4096]), True)])
    refused(client, "an unknown model", "nothing", [tensor("a", a, True)])
    print(f"tritonclient: {asked + len(pending) + 1} right answers, 7 refusals")


main(sys.argv[1])
