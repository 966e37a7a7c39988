# vLLM with the client of kvcluster, from the files that git has:
#   git archive HEAD | docker build -t kvcluster-vllm:0.32.0 -f deploy/kubernetes/vllm.Dockerfile -
FROM vllm/vllm-openai-cpu:v0.32.0
COPY . /tmp/kvcluster
RUN uv pip install --no-cache /tmp/kvcluster
