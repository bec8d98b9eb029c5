# docker build -t IMAGE .                                  for TPUs (docs/pods.md)
# docker build -t IMAGE --build-arg EXTRA=cuda12 .         for NVIDIA GPUs
FROM python:3.11-slim
ARG EXTRA=tpu
WORKDIR /speccascade_jax
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRA}]"
CMD ["python", "-m", "experiments.sweep", "--help"]
