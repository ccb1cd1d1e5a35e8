#!/bin/bash
# SFT on one GPU with FSDP, on data prepared by tokenmill.
#
# Usage: run_sft.sh DATA MODEL [overrides of skyrl.train.main_sft ...]
set -euo pipefail

DATA=$1 MODEL=$2
shift 2

STORE=$(tokenmill prepare "$DATA" --tokenizer "$MODEL" --tokenizer-backend transformers \
    --train-on all_assistant_messages --turn-end stop --max-length "${MAX_LENGTH:-512}" --json |
    python -c "import json, sys; print(json.load(sys.stdin)['path'])")

# Ray workers read the store's files, so its path must exist on their machines.
${PYTHON:-python} -m skyrl.train.main_sft \
    strategy=fsdp \
    model.path="$MODEL" \
    "pretokenized_dataset_paths=['$STORE']" \
    sampler=custom \
    sampler_class_path=tokenmill.integrations.skyrl.Sampler \
    'sampler_kwargs={seed: 42}' \
    max_length="${MAX_LENGTH:-512}" \
    batch_size=4 \
    micro_train_batch_size_per_gpu=2 \
    placement.num_nodes=1 \
    placement.num_gpus_per_node=1 \
    logger=console \
    "$@"
