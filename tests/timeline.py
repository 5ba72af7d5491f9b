"""Reads the files of examples/13_timeline.rs, one with Perfetto's published schema, the page as HTML: python3 tests/timeline.py FOLDER.

Every slice ends, none overlaps another one on its track, every arrow that ends began, each task has its track, and both files tell of the same operations.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

folder = Path(sys.argv[1])
trace = Trace()
trace.ParseFromString((folder / "timeline.pftrace").read_bytes())
tracks, parents = {}, {}
slices, counters, begins, ends = defaultdict(list), defaultdict(list), set(), set()
last = 0
for packet in trace.packet:
    assert packet.trusted_packet_sequence_id == 1
    # Nothing is in a field that the schema does not have.
    for message in [packet, packet.track_descriptor, packet.track_event, *packet.track_event.debug_annotations]:
        assert not len(UnknownFieldSet(message)), message
    if packet.HasField("track_descriptor"):
        track = packet.track_descriptor
        assert track.uuid not in tracks, track
        tracks[track.uuid], parents[track.uuid] = track.name, track.parent_uuid
        continue
    event = packet.track_event
    assert packet.timestamp >= last, "in the order of their times"
    last = packet.timestamp
    assert event.track_uuid in tracks, event
    open_slices = slices[event.track_uuid]
    if event.type == TrackEvent.TYPE_SLICE_BEGIN:
        assert not open_slices or open_slices[-1][2] is not None, "they overlap"
        open_slices.append([event.name, packet.timestamp, None])
        begins.update(event.flow_ids)
        ends.update(event.terminating_flow_ids)
    elif event.type == TrackEvent.TYPE_SLICE_END:
        assert open_slices and open_slices[-1][2] is None, "it never began"
        open_slices[-1][2] = packet.timestamp
    else:
        assert event.type == TrackEvent.TYPE_COUNTER, event
        counters[tracks[event.track_uuid]].append(event.counter_value)
assert all(end is not None for track in slices.values() for _, _, end in track)
assert begins == ends and begins, "the reader waits for a launch"
in_flight, memory = counters["operations in flight"], counters["memory of buffers"]
assert in_flight[-1] == 0 and max(in_flight) > 1, in_flight
to_host = counters["copies to the host"]
assert to_host == [1, 0], to_host
assert min(memory) == max(memory) == 2 * (4 << 20), memory

device = next(uuid for uuid, name in tracks.items() if name.endswith("on the device"))
on_device = sorted(
    (begin, end - begin, name) for uuid, track in slices.items() if parents[uuid] == device for name, begin, end in track
)
page = (folder / "timeline.html").read_text()
operations = json.loads(page.partition('<script id="trace" type="application/json">')[2].partition("</script>")[0])["operations"]
bars = sorted((round(op["started"] * 1e3), round(op["completed"] * 1e3) - round(op["started"] * 1e3), op["name"]) for op in operations)
assert on_device == bars, (on_device, bars)
tasks = next(uuid for uuid, name in tracks.items() if name.endswith("in tasks"))
in_tasks = sorted((tracks[uuid], name) for uuid, track in slices.items() if parents[uuid] == tasks for name, _, _ in track)
awaited = [op for op in operations if op["polled"] is not None or op["woken"] is not None]
assert in_tasks == sorted((f"task {op['task']}", op["name"]) for op in awaited if "task" in op), (in_tasks, awaited)
assert len({task for task, _ in in_tasks}) == 2, "one waits for its download, one for its launches"
print(f"{len(bars)} operations on {sum(parent == device for parent in parents.values())} tracks, {len(begins)} arrows")
