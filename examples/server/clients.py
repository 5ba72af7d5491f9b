"""The example server under the clients that people have: one table of what each of them saw.

    cargo build --release --package gpu-await-example-server --bin server
    apt-get install wrk apache2-utils nghttp2-client hey; cargo install oha
    pip install 'httpx[http2]' aiohttp 'tritonclient[http]'
    python examples/server/clients.py target/release/server

Starts the server on a free port, on the device that GPU_AWAIT_DEVICE names (the host without it), and runs each tool with
each request at 1, 64 and 256 connections; then a second server, of little capacity, at several times what it can. A tool
that is missing gets a line that says so.

    requests   that were sent, in a number or a time that is given below
    failures   without an answer: refused, reset or timed-out connections, streams that were reset, bodies cut short
    429, 503   refused: there was too much to do, or its time was up
    other      answered with another status than these and 200
    p50, p99   milliseconds until the answer, refusals included
    good/s     answers with 200 a second
    cores      that the server kept busy: a tool that keeps it less busy than there are cores measures itself

Ends with 1 if there were failures, other statuses, refusals by the server with room, or the server was not well at the end.
"""

import argparse
import asyncio
import collections
import contextlib
import csv
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

CONNECTIONS = (1, 64, 256)
REQUESTS = 10_000
PYTHON_REQUESTS = 2_000
ALONE = 5  # so many times fewer at one connection
SECONDS = 3  # of wrk, which counts no requests
PYTHON_SECONDS = 5  # that a library sends at most
PATIENCE = 60  # seconds that a tool may take; one that takes longer is a failure
SMALL_SERVER = "--streams 1 --max-in-flight 2 --max-waiting 64 --request-timeout-ms 100".split()

Request = collections.namedtuple("Request", "name method path content_type body")
Row = collections.namedtuple("Row", "requests failures full late other p50 p99 seconds note", defaults=[""])


def requests():
    tokens = list(range(1, 17))
    tensor = {"name": "tokens", "shape": [16], "datatype": "UINT32", "data": tokens}
    as_json = lambda value: json.dumps(value).encode()
    matrices = lambda n: b"\0\0\x80\x3f" * (2 * n * n)  # ones
    matmul = lambda n: Request(f"matmul {n}", "POST", f"/matmul?m={n}&k={n}&n={n}", "application/octet-stream", matrices(n))
    usual = [
        Request("embed", "POST", "/embed", "application/json", as_json({"tokens": tokens})),
        matmul(32),
        Request("health", "GET", "/healthz", None, None),
        Request("infer", "POST", "/v2/models/embed/infer", "application/json", as_json({"inputs": [tensor]})),
    ]
    return usual, matmul(128)


# ---- what rows are made of -----------------------------------------------------------------------


def row(sent, statuses, times, seconds, note=""):
    """Of answers by status, and the milliseconds that each took."""
    answered = sum(statuses.values())
    full, late = statuses[429], statuses[503]
    times = sorted(times)
    at = lambda part: times[min(len(times) - 1, int(len(times) * part))] if times else float("nan")
    return Row(sent, sent - answered, full, late, answered - full - late - statuses[200], at(0.5), at(0.99), seconds, note)


def count(most, connections):
    return most // ALONE if connections == 1 else most


def number(pattern, text, missing=0):
    found = re.search(pattern, text)
    return float(found[1]) if found else missing


def milliseconds(text):
    value, unit = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text).groups()
    return float(value) * {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000}[unit]


# ---- programs ------------------------------------------------------------------------------------


class Program:
    """A load tool that is a program, which `runs` the server and whose output is read afterwards."""

    def __init__(self, name, protocol, program, run, connections=CONNECTIONS):
        self.name, self.protocol, self.program, self.run, self.connections = name, protocol, program, run, connections

    def missing(self):
        return None if shutil.which(self.program) else f"no program `{self.program}`"

    def can(self, request):
        return True

    def __call__(self, address, request, connections):
        with tempfile.TemporaryDirectory() as folder:
            body = os.path.join(folder, "body")
            with open(body, "wb") as file:
                file.write(request.body or b"")
            return self.run(f"http://{address}{request.path}", request, connections, count(REQUESTS, connections), body, folder)


def output(*command):
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    if ended.returncode != 0:
        raise RuntimeError(f"ended with {ended.returncode}: {ended.stderr.strip()[-200:] or ended.stdout.strip()[-200:]}")
    return ended.stdout


WRK = """
local threads, file = {}, io.open("BODY", "rb")
wrk.method, wrk.body = "METHOD", file:read("*a")
wrk.headers["content-type"] = "TYPE"
if wrk.body == "" then wrk.body = nil; wrk.headers["content-type"] = nil end
function setup(thread) table.insert(threads, thread) end
function init() statuses = {} end
function response(status) statuses[status] = (statuses[status] or 0) + 1 end
function done(summary, latency)
    for _, thread in ipairs(threads) do
        for status, count in pairs(thread:get("statuses")) do print("status " .. status .. " " .. count) end
    end
end
"""


def wrk(url, request, connections, _, body, folder):
    script = os.path.join(folder, "wrk.lua")
    with open(script, "w") as file:
        file.write(WRK.replace("BODY", body).replace("METHOD", request.method).replace("TYPE", request.content_type or ""))
    threads = str(min(2, connections))
    text = output("wrk", "-t", threads, "-c", str(connections), "-d", f"{SECONDS}s", "--timeout", "20s", "--latency", "-s", script, url)
    statuses = collections.Counter()
    for status, count in re.findall(r"^status (\d+) (\d+)$", text, re.M):
        statuses[int(status)] += int(count)
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    failures = sum(map(int, errors.groups())) if errors else 0
    made = row(sum(statuses.values()) + failures, statuses, [], number(r"requests in ([\d.]+)s", text))
    p50, p99 = (milliseconds(re.search(rf"^ +{percent}% +(\S+) *$", text, re.M)[1]) for percent in (50, 99))
    return made._replace(p50=p50, p99=p99, note=errors[0] if errors else "")


def ab(keep_alive):
    def run(url, request, connections, count, body, folder):
        times = os.path.join(folder, "times.csv")
        what = ["-p", body, "-T", request.content_type] if request.body else []
        if keep_alive:
            what.append("-k")
        # -v 2 prints each status that is not 2xx; -t sets a count, which -n sets again; -r goes on behind a reset.
        text = output("ab", "-q", "-r", "-v", "2", "-s", "20", "-t", str(PATIENCE // 2), "-n", str(count), "-c", str(connections), "-e", times, *what, url)
        with open(times) as file:
            percents = {percent: float(value) for percent, value in list(csv.reader(file))[1:]}
        complete = int(number(r"Complete requests: +(\d+)", text))
        kept = int(number(r"Keep-Alive requests: +(\d+)", text))
        parts = re.search(r"\(Connect: (\d+), Receive: (\d+), Length: (\d+), Exceptions: (\d+)\)", text)
        connect, receive, length, exceptions = map(int, parts.groups()) if parts else (0, 0, 0, 0)
        others = collections.Counter(map(int, re.findall(r"Response code not 2xx \((\d+)\)", text)))
        # Refusals have another length than results; so `length` says something where all are results.
        failures = connect + receive + exceptions + (0 if others else length) + (count - complete)
        statuses = collections.Counter({200: count - failures - sum(others.values())}) + others
        made = row(count, statuses, [], number(r"Time taken for tests: +([\d.]+)", text, 1))
        note = f"{complete - kept} not kept alive" if keep_alive and kept < complete else ""
        return made._replace(p50=percents["50"], p99=percents["99"], note=note)

    return run


def h2load(*options):
    def run(url, request, connections, count, body, folder):
        log = os.path.join(folder, "log")
        what = ["-d", body, "-H", f"content-type: {request.content_type}"] if request.body else []
        threads = str(min(2, connections))
        text = output("h2load", "-n", str(count), "-c", str(connections), "-t", threads, f"--log-file={log}", *options, *what, url)
        statuses, times = collections.Counter(), []
        with open(log) as file:
            for _, status, took in csv.reader(file, delimiter="\t"):
                if int(status) > 0:  # -1: a stream that was reset
                    statuses[int(status)] += 1
                    times.append(int(took) / 1000)
        seconds = milliseconds(re.search(r"finished in ([\d.]+(?:us|ms|s|m)),", text)[1]) / 1000
        return row(count, statuses, times, seconds)

    return run


def hey(url, request, connections, count, body, folder):
    what = ["-m", "POST", "-T", request.content_type, "-D", body] if request.body else []
    text = output("hey", "-n", str(count), "-c", str(connections), *what, url)
    statuses = collections.Counter({int(status): int(n) for status, n in re.findall(r"\[(\d{3})\]\s+(\d+) responses", text)})
    # It sends a number that divides by the connections.
    sent = count // connections * connections
    made = row(sent, statuses, [], number(r"Total:\s+([\d.]+) secs", text, 1))
    p50, p99 = (1000 * number(rf"{percent}% in ([\d.]+) secs", text, float("nan")) for percent in (50, 99))
    errors = re.findall(r"^\s+\[\d+\]\s+((?:Get|Post) .*)$", text, re.M)
    return made._replace(p50=p50, p99=p99, note=errors[0] if errors else "")


def oha(*options):
    def run(url, request, connections, count, body, folder):
        what = ["-m", "POST", "-T", request.content_type, "-D", body] if request.body else []
        text = output("oha", "--no-tui", "--output-format", "json", "-n", str(count), "-c", str(connections), *options, *what, url)
        found = json.loads(text)
        statuses = collections.Counter({int(status): n for status, n in found["statusCodeDistribution"].items()})
        made = row(count, statuses, [], found["summary"]["total"])
        percents, errors = found["latencyPercentiles"], found["errorDistribution"]
        return made._replace(p50=1000 * percents["p50"], p99=1000 * percents["p99"], note=str(errors) if errors else "")

    return run


# ---- Python clients ------------------------------------------------------------------------------


class Library:
    """A client that is a Python library: `connections` tasks, each of which sends one request behind the other."""

    def __init__(self, name, protocol, package, run, can=lambda request: True, connections=CONNECTIONS):
        self.name, self.protocol, self.package = name, protocol, package
        self.run, self.can, self.connections = run, can, connections

    def missing(self):
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return f"no package `{self.package}`"
        return None

    def __call__(self, address, request, connections):
        tally = Tally(count(PYTHON_REQUESTS, connections))
        start = time.perf_counter()
        self.run(address, request, connections, tally)
        note = max(tally.errors, key=tally.errors.get, default="")
        return row(tally.sent, tally.statuses, tally.times, time.perf_counter() - start, note)


class Tally:
    def __init__(self, count):
        self.count, self.sent, self.times = count, 0, []
        self.statuses, self.errors = collections.Counter(), collections.Counter()
        self.end = time.perf_counter() + PYTHON_SECONDS

    def more(self):
        if self.sent == self.count or time.perf_counter() > self.end:
            return False
        self.sent += 1
        return True

    def answered(self, status, start):
        self.statuses[status] += 1
        self.times.append(1000 * (time.perf_counter() - start))

    def failed(self, error):
        self.errors[f"{type(error).__name__}: {error}"[:100]] += 1


def in_tasks(opened):
    """Sends in as many tasks as there are connections; `opened` is a context manager that gives what sends one request."""

    def run(address, request, connections, tally):
        async def worker(send):
            while tally.more():
                start = time.perf_counter()
                try:
                    tally.answered(await send(), start)
                except Exception as error:
                    tally.failed(error)

        async def all_of_them():
            async with asyncio.timeout(PATIENCE), opened(address, request, connections) as send:
                await asyncio.gather(*(worker(send) for _ in range(connections)))

        asyncio.run(all_of_them())

    return run


def httpx_of(is_http2):
    @contextlib.asynccontextmanager
    async def opened(address, request, connections):
        import httpx

        headers = {"content-type": request.content_type} if request.body else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        async with httpx.AsyncClient(http1=not is_http2, http2=is_http2, limits=limits, timeout=20, trust_env=False) as client:

            async def send():
                answer = await client.request(request.method, f"http://{address}{request.path}", content=request.body, headers=headers)
                expected = "HTTP/2" if is_http2 else "HTTP/1.1"
                assert answer.http_version == expected and answer.content, answer
                return answer.status_code

            yield send

    return in_tasks(opened)


def aiohttp_of():
    @contextlib.asynccontextmanager
    async def opened(address, request, connections):
        import aiohttp

        headers = {"content-type": request.content_type} if request.body else {}
        connector, limit = aiohttp.TCPConnector(limit=connections), aiohttp.ClientTimeout(total=20)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as client:

            async def send():
                async with client.request(request.method, f"http://{address}{request.path}", data=request.body, headers=headers) as answer:
                    assert await answer.read()
                    return answer.status

            yield send

    return in_tasks(opened)


def tensors(triton):
    import numpy

    tokens = triton.InferInput("tokens", [16], "UINT32")
    tokens.set_data_from_numpy(numpy.arange(1, 17, dtype=numpy.uint32))
    return [tokens]


def status_of(error):
    """Of an InferenceServerException: its status is that of HTTP, or `Status.` and a name."""
    found = re.search(r"\d{3}", str(error.status()))
    if not found:
        raise error
    return int(found[0])


def triton_gevent(address, request, connections, tally):
    import gevent.pool
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

    client, inputs = triton.InferenceServerClient(address, concurrency=connections), tensors(triton)

    def worker():
        while tally.more():
            start = time.perf_counter()
            try:
                if request.name == "health":
                    assert client.is_server_live()
                else:
                    assert client.infer("embed", inputs).as_numpy("embedding").shape == (64,)
                tally.answered(200, start)
            except InferenceServerException as error:
                tally.answered(status_of(error), start)
            except Exception as error:
                tally.failed(error)

    workers = gevent.pool.Group()
    for _ in range(connections):
        workers.spawn(worker)
    workers.join(timeout=PATIENCE)
    client.close()


def triton_asyncio():
    @contextlib.asynccontextmanager
    async def opened(address, request, connections):
        import tritonclient.http.aio as triton
        from tritonclient.utils import InferenceServerException

        inputs = tensors(triton)
        async with triton.InferenceServerClient(address, conn_limit=connections) as client:

            async def send():
                try:
                    if request.name == "health":
                        assert await client.is_server_live()
                    else:
                        assert (await client.infer("embed", inputs)).as_numpy("embedding").shape == (64,)
                    return 200
                except InferenceServerException as error:
                    return status_of(error)

            yield send

    return in_tasks(opened)


def tools():
    is_triton = lambda request: request.name in ("health", "infer")
    return [
        Program("wrk", "1.1", "wrk", wrk),
        Program("ab -k", "1.0", "ab", ab(True)),
        Program("ab", "1.0", "ab", ab(False), (64,)),
        Program("h2load", "1.1", "h2load", h2load("--h1")),
        Program("h2load", "2", "h2load", h2load()),
        # More streams at once than most servers allow, from before the server has said how many.
        Program("h2load -m 128", "2", "h2load", h2load("-m", "128"), (1, 8)),
        Program("hey", "1.1", "hey", hey),
        Program("oha", "1.1", "oha", oha()),
        Program("oha", "2", "oha", oha("--http2")),
        Library("httpx", "1.1", "httpx", httpx_of(False)),
        Library("httpx", "2", "h2", httpx_of(True)),
        Library("aiohttp", "1.1", "aiohttp", aiohttp_of()),
        Library("tritonclient", "1.1", "tritonclient", triton_gevent, is_triton),
        Library("tritonclient aio", "1.1", "tritonclient", triton_asyncio(), is_triton),
    ]


# ---- the server ----------------------------------------------------------------------------------


class Server:
    def __init__(self, program, *options):
        self.log = tempfile.TemporaryFile("w+")
        env = {"GPU_AWAIT_DEVICE": "host", "RUST_LOG": "warn", **os.environ}
        command = [program, "--listen", "127.0.0.1:0", "--lame-duck-ms", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env)
        line = self.process.stdout.readline()
        if not line.startswith("listening on http://"):
            self.process.kill()
            sys.exit(f"{program} does not listen: {line}")
        self.address = line.strip().removeprefix("listening on http://")

    def rss(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return number(r"VmRSS:\s+(\d+) kB", file.read()) / 1024

    def busy(self):
        """Seconds of a core that it has used."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        """Whether it is well, ends in order and has logged nothing; says so."""
        health = urllib.request.urlopen(f"http://{self.address}/healthz", timeout=10).read().decode()
        memory = self.rss()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=20)
        self.log.seek(0)
        lines = self.log.read().splitlines()
        print(f"at the end: /healthz says `{health}`, resident {memory:.0f} MiB, it ended with {code}, warnings in its log: {len(lines)}")
        for line in lines[:10]:
            print(f"    {line}")
        return health == "ok" and code == 0 and not lines


HEADS = ("tool", "HTTP", "request", "connections", "requests", "failures", "429", "503", "other", "p50 ms", "p99 ms", "good/s", "cores")
FORMAT = "{:<16} {:>4}  {:<10} {:>11} {:>8} {:>8} {:>6} {:>6} {:>6} {:>8} {:>8} {:>7} {:>5}  {}"


def measure(server, tool, request, connections, is_overload):
    """Prints a row; returns whether it is as it should be."""
    head = (tool.name, tool.protocol, request.name, connections)
    busy, start = server.busy(), time.perf_counter()
    try:
        got = tool(server.address, request, connections)
    except Exception as error:
        print(FORMAT.format(*head, *["-"] * 9, f"{type(error).__name__}: {error}"), flush=True)
        return False
    cores = (server.busy() - busy) / (time.perf_counter() - start)
    good = (got.requests - got.failures - got.full - got.late - got.other) / got.seconds
    figures = (got.requests, got.failures, got.full, got.late, got.other, f"{got.p50:.2f}", f"{got.p99:.2f}", f"{good:.0f}", f"{cores:.1f}")
    print(FORMAT.format(*head, *figures, got.note).rstrip(), flush=True)
    return got.failures == 0 and got.other == 0 and (is_overload or got.full + got.late == 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="the program")
    parser.add_argument("--only", default="", help="tools whose name has this in it")
    options = parser.parse_args()
    (usual, large), is_good, there = requests(), True, []
    for tool in tools():
        why = tool.missing()
        if why:
            print(f"not run: {tool.name}, HTTP/{tool.protocol}: {why}")
        elif options.only in tool.name:
            there.append(tool)

    for title, arguments, asked, is_overload in (
        ("with room", [], usual, False),
        (f"overloaded: {' '.join(SMALL_SERVER)}", SMALL_SERVER, [large], True),
    ):
        server = Server(options.server, *arguments)
        print(f"\n## {title}\nat the start: resident {server.rss():.0f} MiB\n")
        print(FORMAT.format(*HEADS, "").rstrip())
        for request in asked:
            for tool in there:
                at = tool.connections if tool.can(request) else ()
                if is_overload:
                    # With one connection it is what the server can do, and not too much.
                    at = (1, 256) if 256 in at else ()
                for connections in at:
                    is_good &= measure(server, tool, request, connections, is_overload and connections > 1)
        print()
        is_good &= server.end()
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
