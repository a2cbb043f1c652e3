# One file for the three images; --target chooses: operator, server, e2e.
#
#   docker build --target server --tag gantry.dev/server:dev .                      compiles inside the build
#   docker build --target server --build-arg BUILD=binaries --tag … .               copies what `cargo build --release` made here
#
# The second form is what `make images` uses: cargo has just built the binaries, with its cache, for the tests too. The
# server gets what target/backends has: what `make backends` and `make cuda` put there, or nothing.
#
# In the first form VARIANTS are the CPU backends that are compiled, beside the one that the server has linked in, and
# CUDA_ARCHITECTURES, where it is not empty, asks for the CUDA backend and NVIDIA's libraries:
#
#   docker build --target server --build-arg CUDA_ARCHITECTURES="80;90" --tag gantry.dev/server:dev .
ARG BUILD=source
ARG VARIANTS="x64 alderlake skylakex icelake zen4 sapphirerapids"
ARG CUDA_ARCHITECTURES=""
ARG DEBIAN=docker.io/library/debian:bookworm-slim
ARG RUST=docker.io/library/rust:1.95-bookworm

FROM ${RUST} AS build-source
RUN apt-get update \
    && apt-get install -y --no-install-recommends clang cmake libclang-dev ninja-build python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --release --locked --workspace --bins \
    && install -D -t /out target/release/gantry-operator target/release/gantry-server target/release/gantry-e2e

FROM build-source AS backends-source
ARG VARIANTS
ARG CUDA_ARCHITECTURES
RUN --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && VARIANTS="${VARIANTS}" hack/backends.sh \
    && if [ -n "${CUDA_ARCHITECTURES}" ]; then CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES}" hack/cuda.sh; fi \
    && cp -r target/backends /out/backends

FROM ${DEBIAN} AS build-binaries
LABEL dev.gantry.stage=binaries
COPY target/release/gantry-operator target/release/gantry-server target/release/gantry-e2e /out/

FROM ${DEBIAN} AS backends-binaries
LABEL dev.gantry.stage=binaries
COPY target/backends /out/backends

FROM build-${BUILD} AS build
FROM backends-${BUILD} AS backends

# What each image stands on: libc and libstdc++ are Debian's, certificates are for the API server's and models' https.
FROM ${DEBIAN} AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libstdc++6 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/* /var/log/*
ARG VERSION=0.1.0
LABEL org.opencontainers.image.source="https://github.com/gantry-dev/gantry" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="Gantry" \
      org.opencontainers.image.version="${VERSION}"
USER 65532:65532

FROM base AS operator
LABEL org.opencontainers.image.title="gantry-operator" \
      org.opencontainers.image.description="Kubernetes operator that rolls out GGUF models as validated, reversible versions"
COPY --from=build /out/gantry-operator /usr/local/bin/gantry-operator
ENTRYPOINT ["/usr/local/bin/gantry-operator"]
CMD ["run"]

FROM base AS server
LABEL org.opencontainers.image.title="gantry-server" \
      org.opencontainers.image.description="OpenAI-compatible inference server for GGUF models"
COPY --from=build /out/gantry-server /usr/local/bin/gantry-server
# Where the server looks for them by itself. The driver's library, libcuda.so.1, comes from the node.
COPY --from=backends /out/backends /usr/local/lib/gantry
EXPOSE 8080
ENTRYPOINT ["/usr/local/bin/gantry-server"]

# The openai client of the tests, without pip. A CA bundle given as the secret `ca` is trusted for the download, for
# machines behind an inspecting proxy: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
FROM ${DEBIAN} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY e2e/image/requirements.txt /tmp/requirements.txt
RUN --mount=type=secret,id=ca \
    python3 -m venv /opt/openai \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && /opt/openai/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check --only-binary :all: \
        --no-deps --require-hashes -r /tmp/requirements.txt \
    && /opt/openai/bin/pip uninstall -y pip setuptools

FROM base AS e2e
LABEL org.opencontainers.image.title="gantry-e2e" \
      org.opencontainers.image.description="Model store, load generator and clients for Gantry's demo and tests"
USER 0:0
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-minimal python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/* /var/log/*
COPY --from=python /opt/openai /opt/openai
COPY e2e/models/*.gguf e2e/models/eval.jsonl /models/
COPY --from=build /out/gantry-e2e /usr/local/bin/gantry-e2e
ENV PATH=/opt/openai/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["/usr/local/bin/gantry-e2e"]
