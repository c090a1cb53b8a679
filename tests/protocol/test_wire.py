"""Travel between processes: what is copied, what is not, and that everything arrives."""

from __future__ import annotations

import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from verl.errors import DataError
from verl.protocol import DataProto, deep_equal
from verl.protocol.codec import Decoder, Encoder


class Custom:
    """A class that only a pickle can carry."""

    def __init__(self, value: int):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    __hash__ = None


def sent(data: DataProto) -> tuple[DataProto, int, list[pickle.PickleBuffer]]:
    """The batch after a transport with out-of-band buffers, the size of the in-band part, and the buffers."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=buffers), len(text), buffers


def test_tensors_and_arrays_travel_without_a_copy():
    data = DataProto.from_dict(
        {"x": torch.rand(100, 1000), "h": torch.rand(100, 8).bfloat16()}, {"n": np.arange(100.0)}, {"t": 1.0}
    )
    back, in_band, _ = sent(data)
    assert in_band < 1000
    assert back.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    assert back.batch["h"].data_ptr() == data.batch["h"].data_ptr() and back.batch["h"].dtype == torch.bfloat16
    assert np.shares_memory(back.non_tensor_batch["n"], data.non_tensor_batch["n"])
    assert torch.equal(back.batch["x"], data.batch["x"]) and back.meta_info == {"t": 1.0}


def test_a_row_slice_travels_as_its_rows_only():
    data = DataProto.from_dict({"x": torch.arange(1000).reshape(100, 10)}, {"n": np.arange(100)})
    _, in_band, buffers = sent(data[20:22])
    assert sum(b.raw().nbytes for b in buffers) == 2 * 10 * 8 + 2 * 8 and in_band < 1000


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_transport_without_buffers_works_too(protocol):
    data = DataProto.from_dict({"x": torch.arange(6).reshape(2, 3).t()[:2]}, {"c": [{"a": 1}, [2]]})
    back = pickle.loads(pickle.dumps(data, protocol=protocol))
    assert torch.equal(back.batch["x"], data.batch["x"]) and back.non_tensor_batch["c"].tolist() == [{"a": 1}, [2]]
    back.batch["x"][0, 0] = 9  # its own memory


def test_object_columns_travel_as_json_and_bytes_with_their_types():
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    values = [list(range(10000)), {"img": image, "raw": b"x" * 100000}, ("t", None, True), np.float32(2)]
    back, in_band, _ = sent(DataProto.from_dict(non_tensors={"c": values}))
    column = back.non_tensor_batch["c"].tolist()
    assert in_band < 1000
    assert column[0] == values[0] and column[2] == values[2] and type(column[3]) is np.float32
    assert column[1]["raw"] == values[1]["raw"] and np.array_equal(np.asarray(column[1]["img"]), np.asarray(image))


def test_objects_without_an_encoding_are_left_to_the_transport():
    back, _, _ = sent(DataProto.from_dict(non_tensors={"c": [Custom(1), Custom(2)]}, meta_info={"m": Custom(3)}))
    assert back.non_tensor_batch["c"].tolist() == [Custom(1), Custom(2)] and back.meta_info["m"] == Custom(3)


def test_nested_and_special_tensors_arrive():
    nested = TensorDict({"a": torch.ones(2, 3)}, batch_size=[2])
    data = DataProto(batch=TensorDict({"n": nested, "s": torch.eye(2).to_sparse()}, batch_size=[2]))
    back, _, _ = sent(data)
    assert torch.equal(back.batch["n"]["a"], torch.ones(2, 3)) and back.batch["s"].is_sparse


def test_read_only_memory_gives_tensors_without_a_warning():
    data = DataProto.from_dict({"x": torch.arange(4), "empty": torch.zeros(4, 0)})
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(b.raw()) for b in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(text, buffers=frozen)
    assert back.batch["x"].tolist() == [0, 1, 2, 3] and back.batch["empty"].shape == (4, 0)


def test_memory_lives_as_long_as_the_tensor_that_uses_it():
    def make() -> torch.Tensor:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(DataProto.from_dict({"x": torch.arange(100000)}), 5, buffer_callback=buffers.append)
        return pickle.loads(text, buffers=[bytes(b.raw()) for b in buffers]).batch["x"]

    tensor = make()
    _ = [bytes(800000) for _ in range(20)]  # would reuse freed memory
    assert torch.equal(tensor, torch.arange(100000))


def test_a_subclass_stays_a_subclass():
    back, _, _ = sent(Sub.from_dict({"x": torch.ones(1)}))
    assert type(back) is Sub and deep_equal(back.batch["x"], torch.ones(1))


class Sub(DataProto):
    pass


def test_the_samples_of_a_prompt_share_its_images_on_the_wire_too():
    pixels = torch.arange(40_000, dtype=torch.float32).view(10, 4000)
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    prompts = [{"pixel_values": pixels, "image_grid_thw": torch.ones(1, 3, dtype=torch.int64)}, {}]
    inputs, seen = np.empty(2, object), np.empty(2, object)
    inputs[:], seen[:] = prompts, [{"images": [image]}, {"images": []}]
    one = DataProto.from_dict(non_tensors={"multi_modal_inputs": inputs, "multi_modal_data": seen})
    size = len(pickle.dumps(one, protocol=5))
    eight = pickle.dumps(one.repeat(8), protocol=5)
    assert len(eight) < size + 8_000  # seven more copies would be 1.1 million bytes
    back = pickle.loads(eight).non_tensor_batch
    first = back["multi_modal_inputs"][0]
    assert all(back["multi_modal_inputs"][i] is first for i in range(8)) and torch.equal(first["pixel_values"], pixels)
    assert back["multi_modal_data"][0]["images"][0] is back["multi_modal_data"][7]["images"][0]
    assert back["multi_modal_inputs"][8] == {}


def test_equal_tensors_that_are_not_shared_stay_two():
    column = np.empty(2, object)
    column[:] = [{"a": torch.ones(3)}, {"a": torch.ones(3)}]
    back = pickle.loads(pickle.dumps(DataProto.from_dict(non_tensors={"x": column}), protocol=5)).non_tensor_batch["x"]
    back[0]["a"].add_(1)
    assert back[0]["a"].tolist() == [2.0] * 3 and back[1]["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("form", ["png", "raw"])
def test_images_of_more_pixels_than_allowed_together_are_refused_undecoded(form):
    encoder = Encoder(images=form)
    text = json.dumps(encoder.encode([Image.new("RGB", (4, 5)), Image.new("L", (3, 7))]))
    assert [one.size for one in Decoder(encoder.blobs(), max_pixels=41).decode(text)] == [(4, 5), (3, 7)]
    with pytest.raises(DataError, match="3 x 7 pixels, with which the images have too many"):
        Decoder(encoder.blobs(), max_pixels=40).decode(text)
