from rl_core.environments.child import process_variables


def test_only_what_is_on_the_list_is_passed_on() -> None:
    driver = {"PATH": "/bin", "LC_ALL": "C", "HF_HOME": "/cache", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    variables = process_variables(driver | {"WANDB_API_KEY": "x", "HTTPS_PROXY": "http://me:x@proxy"}, {})
    assert {name: variables[name] for name in ("PATH", "LC_ALL", "HF_HOME")} == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HF_HOME": "/cache",
    }
    assert "x" not in variables.values()
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HTTPS_PROXY"} & set(variables)


def test_settings_win() -> None:
    driver = {"OMP_NUM_THREADS": "16", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}
    assert process_variables(driver, {})["OMP_NUM_THREADS"] == "1"
    assert process_variables(driver, {})["CUDA_VISIBLE_DEVICES"] == ""
    chosen = {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "3", "PATH": "/usr/bin", "JUDGE_KEY": "x"}
    assert process_variables(driver, chosen).items() >= chosen.items()
