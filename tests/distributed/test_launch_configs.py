# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Tests the configs of `trl_multimodal_rft/accelerate_configs`: how accelerate reads their fields, and an example script
launched on the CPU with them, once by the command that users type. In code, `test_distributed.py` trains with what
`hsdp.yaml` and `deepspeed_zero2.yaml` set.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from helpers import forked
from helpers.processes import PATIENCE, end, free_port
from helpers.trainer_utils import CONFIGS, TRAINERS, length_and_sum, load, make_trainer, text_rows
from small_models import spoken_digit_model
from tasks import spoken_digits
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.trainers.base.setup import check_launch


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "trl_multimodal_rft" / "accelerate_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
ZERO = {"deepspeed_zero1": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3}

# The configs target GPUs; these options run them on a CPU
CPU = {"ACCELERATE_USE_CPU": "true"}
IN_FLOAT32 = ["--mixed_precision", "no"]
FROM_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # or set by TRL for vLLM


# Fields


def launch_environment(name, *options):
    """Returns the arguments of the launcher and the environment that it would set."""
    command = ["--config_file", str(FOLDER / f"{name}.yaml"), "--main_process_port", "0", *options, "script.py"]
    args = _validate_launch_command(launch_command_parser().parse_args(command))[0]
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        return args, prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_known(name):
    """`accelerate launch` refuses unknown top-level fields, but ignores unknown nested ones."""
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    options = vars(launch_command_parser().parse_args(["script.py"]))
    assert config.fsdp_config.keys() | config.deepspeed_config.keys() <= options.keys()


def test_types():
    types = {name: load_config_from_file(str(FOLDER / f"{name}.yaml")).distributed_type for name in NAMES}
    assert types == {
        "cpu": DistributedType.NO,
        "single_gpu": DistributedType.NO,
        "multi_gpu": DistributedType.MULTI_GPU,
        "multi_node": DistributedType.MULTI_GPU,
        **dict.fromkeys(["fsdp2", "hsdp"], DistributedType.FSDP),
        **dict.fromkeys(ZERO, DistributedType.DEEPSPEED),
    }


def test_fields_of_one_process_reach_it():
    args, environment = launch_environment("cpu")
    assert args.num_processes == 1
    assert environment["ACCELERATE_USE_CPU"] == "True"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    args, environment = launch_environment("single_gpu")
    assert args.num_processes == 1
    assert environment["ACCELERATE_USE_CPU"] == "False"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert launch_environment("single_gpu", "--gpu_ids", "3")[1]["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("name", [*ZERO, "fsdp2", "hsdp", "multi_gpu", "multi_node"])
def test_fields_of_several_processes_reach_them(name):
    of_machines = name in ("hsdp", "multi_node")
    options = [] if of_machines else ["--num_processes", "16", "--num_machines", "2"]
    options += ["--machine_rank", "1", "--main_process_ip", "10.1.2.3", "--main_process_port", "12345"]
    args, environment = launch_environment(name, *options)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", 1, "8")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("static", "10.1.2.3:12345")
    if not of_machines:
        assert launch_environment(name)[0].nproc_per_node == "8"


FSDP = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
    "fsdp_offload_params": "OffloadPolicy",  # it leaves everything in place
    "fsdp_auto_wrap_policy": "transformer_auto_wrap_policy",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
IN_PLUGIN = {
    "fsdp2": {**FSDP, "replicated": 1, "sharded": 1},  # sizes that aren't set
    "hsdp": {**FSDP, "replicated": 2, "sharded": 8},
    **{
        name: {
            "zero_stage": stage,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": stage == 3,
            "zero3_save_16bit_model": stage == 3,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
        for name, stage in ZERO.items()
    },
}


@pytest.mark.parametrize("name", IN_PLUGIN)
def test_fields_reach_the_plugin(name, monkeypatch):
    args, environment = launch_environment(name)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    if args.use_deepspeed:
        plugin = DeepSpeedPlugin()
        assert {field: getattr(plugin, field) for field in IN_PLUGIN[name]} == IN_PLUGIN[name]
        return
    plugin = FullyShardedDataParallelPlugin()
    parallelism = ParallelismConfig()
    assert (environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true") == (name == "hsdp")
    assert IN_PLUGIN[name] == {
        "fsdp_version": plugin.fsdp_version,
        "fsdp_reshard_after_forward": plugin.reshard_after_forward,
        "fsdp_cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
        "fsdp_activation_checkpointing": plugin.activation_checkpointing,
        "fsdp_offload_params": type(plugin.cpu_offload).__name__,
        "fsdp_auto_wrap_policy": plugin.auto_wrap_policy.__name__,
        "fsdp_state_dict_type": plugin.state_dict_type.name,
        "replicated": parallelism.dp_replicate_size,
        "sharded": parallelism.dp_shard_size,
    }


# Runs


class Outcome:
    """Results of a training run."""

    def __init__(self, folder: Path, output: str, reports: list[dict]):
        self.folder = folder
        self.output = output
        self.reports = sorted(reports, key=lambda facts: facts["process"])

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint-2"

    @property
    def steps(self) -> list[dict]:
        return json.loads((self.checkpoint / "trainer_state.json").read_text())["log_history"]

    def weights(self) -> dict[str, torch.Tensor]:
        model, info = Qwen2AudioForConditionalGeneration.from_pretrained(self.folder, output_loading_info=True)
        assert not any(info.values())
        return model.state_dict()


def wait(process):
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        end(process)
        return f"still running after {PATIENCE} s"


def launch(name, folder, script_options, launcher_options=(), environment=CPU, machines=((),), as_users_type=False):
    """Runs `accelerate launch --config_file ... examples/grpo_audio.py` once per machine, and waits for all."""
    program = ["accelerate", "launch"] if as_users_type else [sys.executable, "-m", "accelerate.commands.launch"]
    reports = folder / "reports"
    reports.mkdir(parents=True)
    inherited = {name: value for name, value in os.environ.items() if name not in FROM_A_LAUNCHER}
    environment = {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "LAUNCH_REPORTS": str(reports),
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # DeepSpeed looks for ninja
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "cpu_site"), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    processes = []
    logs = [folder / f"log{i}.txt" for i in range(len(machines))]
    try:
        for log, machine_options in zip(logs, machines, strict=True):
            command = [
                *(*program, "--config_file", f"trl_multimodal_rft/accelerate_configs/{name}.yaml"),
                *(*launcher_options, *machine_options, "examples/grpo_audio.py"),
                *("--output_dir", str(folder / "output"), *script_options),
            ]
            with log.open("w") as output:
                start = subprocess.Popen if as_users_type else forked.Popen
                processes.append(start(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT))
        codes = [wait(process) for process in processes]
    finally:
        for process in processes:
            end(process)
    output = "".join(log.read_text(errors="replace") for log in logs)
    return codes, Outcome(folder / "output", output, [json.loads(path.read_text()) for path in reports.iterdir()])


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Returns folders of a model and a dataset."""
    folder = tmp_path_factory.mktemp("given")
    for part in spoken_digit_model():
        part.save_pretrained(folder / "model")
    for split, rows in spoken_digits(train_rows=40, test_rows=10).items():
        rows.to_parquet(folder / "data" / f"{split}.parquet")
    return folder


def arguments(given):
    """Trains two steps on one-token completions, some of which are right, and saves them and a checkpoint."""
    return [
        *("--model_name_or_path", str(given / "model"), "--dtype", "float32", "--bf16", "False"),
        *("--dataset_name", str(given / "data"), "--max_completion_length", "1"),
        *("--per_device_train_batch_size", "64", "--gradient_accumulation_steps", "2", "--num_generations", "16"),
        *("--max_steps", "2", "--learning_rate", "1e-3", "--entropy_coef", "0.1"),
        *("--logging_steps", "1", "--report_to", "none", "--save_strategy", "steps", "--save_steps", "2"),
    ]


def trained(name, folder, given, *script_options, launcher_options=("--num_processes", "2", *IN_FLOAT32), **options):
    codes, outcome = launch(name, folder, [*arguments(given), *script_options], launcher_options, **options)
    assert not any(codes), f"{codes}\n{outcome.output[-8000:]}"
    return outcome


def difference(weights, others, frozen=()):
    return torch.cat([(weights[name] - others[name]).flatten() for name in weights if name not in frozen]).norm()


def assert_trained(outcome, given, processes, machines=1, **facts):
    assert [(r["process"], r["processes"]) for r in outcome.reports] == [(i, processes) for i in range(processes)]
    for report in outcome.reports:
        assert report == {**report, "device": "cpu", **facts}
    # Independent runs would each print this
    assert outcome.output.count("padded rows vs. model's forward") == machines
    assert [step["step"] for step in outcome.steps] == [1, 2]
    assert len(list(outcome.checkpoint.glob("rollout_state_*.pt"))) == processes
    before = Qwen2AudioForConditionalGeneration.from_pretrained(given / "model").state_dict()
    assert difference(outcome.weights(), before) > 0.1
    processor = AutoProcessor.from_pretrained(outcome.folder)
    assert processor.tokenizer.get_vocab() == AutoProcessor.from_pretrained(given / "model").tokenizer.get_vocab()


def assert_trained_alike(outcome, other, given, frozen=()):
    for key in ("loss", "grad_norm", "reward", "reward_std", "entropy", "num_tokens"):
        assert [step[key] for step in outcome.steps] == pytest.approx([step[key] for step in other.steps], rel=1e-3)
    weights = outcome.weights()
    others = other.weights()
    before = Qwen2AudioForConditionalGeneration.from_pretrained(given / "model").state_dict()
    assert weights.keys() == others.keys()
    assert difference(weights, others, frozen) <= 1e-2 * difference(others, before)


@pytest.fixture(scope="module")
def multi_gpu(request, tmp_path_factory, given):
    """Runs as a user types it for its own test, and forked as the baseline of others."""
    is_tested = any(item.function is test_multi_gpu for item in request.session.items)
    return trained("multi_gpu", tmp_path_factory.mktemp("multi_gpu") / "run", given, as_users_type=is_tested)


@pytest.mark.gate
def test_multi_gpu(multi_gpu, given):
    assert_trained(multi_gpu, given, 2, type="MULTI_CPU", mixed_precision="no")
    assert max(step["reward_std"] for step in multi_gpu.steps) > 0


@pytest.mark.slow
def test_fsdp2(multi_gpu, given, tmp_path):
    outcome = trained("fsdp2", tmp_path / "run", given, environment={**CPU, "FSDP2_ON_CPU": "true"})
    assert_trained(outcome, given, 2, type="FSDP", fsdp_version=2)
    assert (outcome.checkpoint / "pytorch_model_fsdp_0" / "__1_0.distcp").exists()
    assert not [*outcome.checkpoint.glob("*.safetensors")]
    assert_trained_alike(outcome, multi_gpu, given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed_zero1", "deepspeed_zero3"])
def test_deepspeed(name, multi_gpu, given, tmp_path):
    """On the CPU, an argument of the script selects another DeepSpeed backend, without environment variables."""
    outcome = trained(name, tmp_path / "run", given, "--ddp_backend", "gloo", environment={})
    assert_trained(outcome, given, 2, type="DEEPSPEED", zero_stage=ZERO[name])
    states = sorted(path.name.split("_mp_")[0] for path in outcome.checkpoint.glob("global_step2/*model_states.pt"))
    assert len(list(outcome.checkpoint.glob("global_step2/*optim_states.pt"))) == 2
    frozen = []
    if name == "deepspeed_zero3":
        assert states == ["zero_pp_rank_0", "zero_pp_rank_1"]
        # A sharded model keeps its frozen flags; transformers unfreezes a whole one on loading
        frozen = ["model.audio_tower.embed_positions.weight"]
    assert_trained_alike(outcome, multi_gpu, given, frozen)


@pytest.mark.slow
def test_demo_with_weights_in_parts(tmp_path):
    """The demo builds its model, and samples before and after sharding."""
    script_options = ["--max_steps", "1", "--per_device_train_batch_size", "64", "--ddp_backend", "gloo"]
    launcher_options = ["--num_processes", "2", *IN_FLOAT32]
    codes, outcome = launch("deepspeed_zero3", tmp_path / "run", script_options, launcher_options, environment={})
    assert not any(codes), f"{codes}\n{outcome.output[-8000:]}"
    metrics = json.loads((outcome.folder / "demo_metrics.json").read_text())
    assert metrics["updates"] == 1 and "accuracy_after" in metrics


@pytest.mark.slow
def test_multi_node(multi_gpu, given, tmp_path):
    """Both machines, with one process each, are this one."""
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    machines = [["--machine_rank", str(rank), *address] for rank in range(2)]
    outcome = trained("multi_node", tmp_path / "run", given, machines=machines)
    assert_trained(outcome, given, 2, machines=2, type="MULTI_CPU")
    assert_trained_alike(outcome, multi_gpu, given)


@pytest.mark.slow
@pytest.mark.parametrize("name, launcher_options", [("cpu", []), ("single_gpu", IN_FLOAT32)])
def test_one_process(name, launcher_options, given, tmp_path):
    """`single_gpu.yaml` trains on the CPU if no GPU exists."""
    outcome = trained(name, tmp_path / "run", given, launcher_options=launcher_options, environment={})
    assert_trained(outcome, given, 1, type="NO", mixed_precision="no")


# Independent runs


def test_processes_that_are_not_connected(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="`WORLD_SIZE` is 2, but Accelerate runs this process alone"):
        make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", text_rows(), tmp_path, use_cpu=False)


@pytest.mark.parametrize("name", ["cpu", "single_gpu"])
def test_one_process_instead_of_several(name, monkeypatch):
    """Accelerate launches one process with these configs and ignores `--num_processes`."""
    args = MultimodalGRPOConfig("out", use_cpu=True)
    for processes, refused in (("1", False), ("2", True)):
        for variable, value in launch_environment(name, "--num_processes", processes)[1].items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(RuntimeError, match="to start several.*`multi_gpu.yaml`") if refused else nullcontext():
            check_launch(args, "no/model")


def test_one_process_with_several_gpus(tmp_path):
    args = MultimodalGRPOConfig(str(tmp_path), use_cpu=True)
    args._n_gpu = 2  # as with two GPUs and no launcher
    model, processor = load("qwen2_5_vl")
    with pytest.raises(RuntimeError, match="One process sees 2 GPUs.*`accelerate launch --num_processes 2`"):
        MultimodalGRPOTrainer(model, length_and_sum, args, text_rows(), processing_class=processor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, remedy", [("multi_gpu", "ACCELERATE_USE_CPU=true"), ("deepspeed_zero2", "ddp_backend='gloo'")]
)
def test_launches_that_become_independent_runs(name, remedy, given, tmp_path):
    options = ["--num_processes", "2", *IN_FLOAT32]
    codes, outcome = launch(name, tmp_path / "run", arguments(given), options, environment={})
    assert codes == [1]
    assert "RuntimeError: `WORLD_SIZE` is 2, but Accelerate runs this process alone" in outcome.output
    assert remedy in outcome.output
    assert not outcome.folder.exists()


# Ranks that share rows


@pytest.mark.parametrize("kind", TRAINERS)
def test_ranks_that_share_rows_are_refused(kind, monkeypatch, tmp_path):
    """Before the model is loaded: there is none of this name."""
    config_class = CONFIGS[kind]
    objects = {"train_dataset": text_rows()}
    if kind == "distillation":
        objects["teacher_model"] = load("qwen2_5_vl")[0]
    elif kind not in ("sft", "dpo", "kto", "reward"):
        objects["reward_funcs"] = length_and_sum

    def refused(named, model="no/model", **options):
        args = config_class(str(tmp_path), use_cpu=True, bf16=False, **options)
        with pytest.raises(ValueError, match=f"^{re.escape(named)}: ranks that share a model's layers"):
            TRAINERS[kind](model=model, args=args, **objects)

    refused("`tp_size=2`", parallelism_config=ParallelismConfig(tp_size=2))
    refused("`tp_plan='auto'`", model_init_kwargs={"tp_plan": "auto"})
    model = load("qwen2_5_vl")[0]
    model._tp_size = 2  # as `from_pretrained` sets it
    refused("`model.tp_size=2`", model)
    for name in ("cp_size", "sp_size"):
        with monkeypatch.context() as environment:
            environment.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "2")  # as `accelerate launch` does
            refused(f"`{name}=2`")
    sharded = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)  # as with `hsdp.yaml`
    check_launch(config_class(str(tmp_path), use_cpu=True, parallelism_config=sharded), "no/model")
