# Two images, one recipe:
#
#   docker build --target cpu  -t star-hvd:cpu .
#   docker build --target cuda -t star-hvd:cuda .
#
# (scripts/build_image.sh does the same with buildah, without a daemon.)
#
# Run a job on one machine, with the program in this folder, which becomes the image's working folder:
#   docker run --rm -it --ipc=host -v "$PWD":/workspace star-hvd:cpu horovodrun -np 4 --gloo python train.py
#
# The image's user is star, number 1000, not root; folders that a job writes to must be that user's. On one machine, with
# no ssh, you can also give your own number with --user "$(id -u)" -e HOME=/tmp.
#
# On several hosts, with the folder ./ssh holding two key pairs for the job, readable for that user: id_ed25519, by
# which ranks are let in, and host_ed25519, by which all hosts of the job are known (ssh refuses any other):
#   mkdir -m 700 ssh && ssh-keygen -t ed25519 -N '' -f ssh/id_ed25519 && ssh-keygen -t ed25519 -N '' -f ssh/host_ed25519
#   sudo chown -R 1000 ssh
#   on every other host, in a folder with the same program and the same keys:
#     docker run -d --network=host --ipc=host --gpus=all -v "$PWD":/workspace -v "$PWD"/ssh:/run/star-ssh:ro \
#       star-hvd:cuda sshd
#   on the first (STAR_SSHD=1 installs the key here too):
#     docker run --rm -it --network=host --ipc=host --gpus=all -e STAR_SSHD=1 -v "$PWD":/workspace \
#       -v "$PWD"/ssh:/run/star-ssh:ro star-hvd:cuda \
#       horovodrun -np 16 -H host1:8,host2:8 -p 2222 --gloo python train.py
#
# Flags, and why:
#   --network=host      ranks find each other by the hosts' own names and addresses
#   --ipc=host          NCCL and data loaders share memory; the default /dev/shm is 64 MB
#   -v "$PWD":/workspace    the program, at the same place on every host: horovodrun starts ranks in its own folder
#   --gpus=all          the GPUs (cuda)
#   --cap-add=IPC_LOCK --device=/dev/infiniband    RDMA must pin memory (InfiniBand, RoCE)

ARG BASE_CPU=python:3.11-slim-bookworm
# The CUDA of the base must be that of torch: what package indexes serve as torch
# 2.13.0 is built with CUDA 13.0. For another CUDA set BASE_CUDA and TORCH_INDEX_URL together.
ARG BASE_CUDA=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

# ------------------------------------------------------------------ cpu: compile
FROM ${BASE_CPU} AS cpu-build
ARG TORCH_SPEC=torch==2.13.0
# Without one, indexes serve torch with several GB of CUDA, which this image does not use.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG EXTRAS=train
# For package indexes and certificates of your own. Arguments reach the commands of
# the build as environment variables and do not stay in the image.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT

COPY docker /opt/star/docker
RUN /opt/star/docker/system.sh build
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 STAR_CACHE_DIR=/tmp/star-cache
RUN python3 -m venv /opt/venv \
    && pip install -q "$TORCH_SPEC" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}
# Horovod before the project: its layer is compiled again only if torch, the patches
# or the script change.
COPY patches /opt/star/patches
COPY scripts/build_horovod.py scripts/gpu_build.py scripts/unified_diff.py /opt/star/scripts/
# Whatever torch it is, this image is for machines without GPUs and has no CUDA toolkit.
RUN STAR_CPU_ONLY=1 python /opt/star/scripts/build_horovod.py && rm -rf "$STAR_CACHE_DIR"
RUN /opt/star/docker/check_build.sh PyTorch Gloo
COPY pyproject.toml star_hvd_command.py /opt/star/
COPY scheduler /opt/star/scheduler
COPY star_hvd /opt/star/star_hvd
RUN pip install -q --no-build-isolation "/opt/star[$EXTRAS]"

# ---------------------------------------------------------------------- cpu: run
FROM ${BASE_CPU} AS cpu
COPY docker /opt/star/docker
RUN /opt/star/docker/system.sh run \
    && cp /opt/star/docker/ssh.conf /etc/ssh/ssh_config.d/star.conf \
    && cp /opt/star/docker/sshd.conf /etc/ssh/sshd_config.d/star.conf
COPY --from=cpu-build /opt/venv /opt/venv
# docker/bin has the ssh that checks hosts, whatever horovodrun asks of it.
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/star/docker/bin:/opt/venv/bin:$PATH
RUN /opt/star/docker/check_build.sh PyTorch Gloo && python -c "import scheduler, star_hvd"
WORKDIR /workspace
RUN /opt/star/docker/system.sh user
USER star
ENTRYPOINT ["/opt/star/docker/entrypoint.sh"]
CMD ["bash"]

# -------------------------------------------------------------------------- cuda
# One stage: the base has the compilers, and a job may want nvcc (triton, extensions).
FROM ${BASE_CUDA} AS cuda
ARG TORCH_SPEC=torch==2.13.0
ARG TORCH_INDEX_URL
ARG EXTRAS=train,gpu
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
# Fewer architectures compile faster, for example 80,90.
ARG HOROVOD_BUILD_CUDA_CC_LIST

COPY docker /opt/star/docker
RUN /opt/star/docker/system.sh build && /opt/star/docker/system.sh run \
    && cp /opt/star/docker/ssh.conf /etc/ssh/ssh_config.d/star.conf \
    && cp /opt/star/docker/sshd.conf /etc/ssh/sshd_config.d/star.conf
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/venv \
    && pip install -q "$TORCH_SPEC" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}
COPY patches /opt/star/patches
COPY scripts/build_horovod.py scripts/gpu_build.py scripts/unified_diff.py /opt/star/scripts/
# No driver is there while the image is built: the toolkit's stubs stand in for it,
# and the last ldconfig forgets them again. NCCL is the one that came with torch, not
# the base's; the script refuses a torch for another CUDA than the base's.
RUN ldconfig /usr/local/cuda/lib64/stubs \
    && HOROVOD_GPU_OPERATIONS=NCCL STAR_CACHE_DIR=/tmp/star-cache python /opt/star/scripts/build_horovod.py \
    && /opt/star/docker/check_build.sh PyTorch Gloo NCCL \
    && ldconfig && rm -rf /tmp/star-cache
COPY pyproject.toml star_hvd_command.py /opt/star/
COPY scheduler /opt/star/scheduler
COPY star_hvd /opt/star/star_hvd
RUN pip install -q --no-build-isolation "/opt/star[$EXTRAS]" && python -c "import scheduler"
ENV PATH=/opt/star/docker/bin:$PATH
WORKDIR /workspace
RUN /opt/star/docker/system.sh user
USER star
ENTRYPOINT ["/opt/star/docker/entrypoint.sh"]
CMD ["bash"]
