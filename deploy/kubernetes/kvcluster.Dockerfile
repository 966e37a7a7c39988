# The image of the chart, from the files that git has:
#   git archive HEAD | docker build -t kvcluster:0.3.0.dev0 -f deploy/kubernetes/kvcluster.Dockerfile -
FROM python:3.12 AS build
COPY . /kvcluster
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /kvcluster

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/kvcluster-*.whl)[cluster]"
USER 10001:10001
