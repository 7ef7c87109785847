# vLLM's own image with the shim in its environment, for who would rather build an image than lay the shim beside it:
#
#   docker build -f deploy/docker/vllm.Dockerfile -t vllm-kvatlas:0.32.0 .
#
# The shim needs NumPy alone, which vLLM has: no package of vLLM's is added, removed or changed.
ARG VLLM=vllm/vllm-openai:v0.32.0
ARG SHIM=kvatlas-shim:0.1.0

FROM ${SHIM} AS shim

FROM ${VLLM}
COPY --from=shim /wheels /tmp/kvatlas
RUN python3 -m pip install --no-deps --no-index --find-links /tmp/kvatlas kvatlas-shim
