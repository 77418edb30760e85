# MVP Engine with all extras on a GPU host: torch's wheels bring CUDA, so the image needs no CUDA toolkit.
#
#   docker build -t mvp-engine .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/workspace" mvp-engine train mine/configs/train.yaml
#
# --ipc=host: the loader's workers share memory through /dev/shm, of which Docker gives 64 MB.
FROM python:3.12-slim

# gcc: Triton compiles a launcher for its kernels (model.compile, FlexAttention). git: runs record the commit.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv

# The dependencies are a layer of their own, which a change of the code does not build again.
WORKDIR /opt/mvp-engine
COPY pyproject.toml constraints.txt ./
RUN uv pip install --system --no-cache --constraint constraints.txt --requirement pyproject.toml --extra all

COPY setup.py MANIFEST.in README.md LICENSE ./
COPY mvp_engine mvp_engine
COPY recipes recipes
COPY skills skills
COPY docs docs
RUN uv pip install --system --no-cache --no-deps .

# Downloads of the Hugging Face Hub outlive the container if /workspace is mounted.
ENV HF_HOME=/workspace/.cache/huggingface
WORKDIR /workspace
ENTRYPOINT ["mvp"]
CMD ["--help"]
