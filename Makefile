# PYTHON names the interpreter (3.11 to 3.14); TORCH=pypi allows PyPI's build of PyTorch, with its 3 GB of CUDA libraries.
PYTHON ?= python3
export TORCH ?= cpu
BIN := .venv/bin

.PHONY: run lab test env lock lint clean

run: env  ## execute the first notebooks on this machine
	@$(BIN)/python -m helpers.course.execute notebooks/00*.ipynb notebooks/01*.ipynb

lab: env  ## read and run the notebooks in a browser
	@$(BIN)/jupyter lab --ip=127.0.0.1 --allow-root

test: env lint  ## every test, and every notebook against its stored outputs
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not vllm" tests
	@$(BIN)/python -m pytest --durations=10 -m vllm tests
	@$(BIN)/python -m pytest --durations=10 --nbval notebooks

env:
	@$(PYTHON) -m helpers.course.environment

lint: env
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

# The pins of pyproject.toml, completed with hashes (needs uv). requirements-torch-cpu.lock is kept by hand: its hashes are
# those that PyTorch's own index gives for the CPU build.
COMPILE := uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
	--custom-compile-command "make lock"
X86_LINUX := platform_machine == 'x86_64' and sys_platform == 'linux'

lock:
	$(COMPILE) pyproject.toml --extra cpu --extra dev --no-emit-package torch --output-file requirements.lock
	sed -i "s/ \(;\|and\) $(X86_LINUX)//" requirements.lock
	grep -x '    "torch==.*",' pyproject.toml | tr -d ' ",' | $(COMPILE) --no-config - --constraints requirements.lock \
		--no-emit-package setuptools --output-file requirements-torch-pypi.lock

clean:  ## remove the environment and everything that a run wrote
	rm -rf .venv out .pytest_cache .ruff_cache .hypothesis *.egg-info
