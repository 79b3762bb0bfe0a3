"""The table of a model card: held-out accuracy at the logged step that is nearest to each of its columns."""

from omegaconf import OmegaConf

from immunization.results import model_card
from immunization.runs.result import Result

FACTS = {"weights": "random weights", "architecture": "test_resnet", "dtype": "float32", "data_config": {}}
ABOUT = {
    "data": {"primary": "digits"},
    "rows": {"primary": {"train": 10, "val": 5, "test": 5}},
    "classes": {"primary": 2},
}


def test_columns_show_the_nearest_steps(tmp_path):
    steps = [1, 12, 80, 1300, 9000, 120_000]
    curves = {"probe/harmful": {"x": steps, "y": [0.1 * (i + 1) for i in range(6)]}}
    curves["probe/harmful/baseline"] = {"x": [1, 1000], "y": [0.25, 0.75]}
    result = Result(0, "digits", "test_resnet", "closed_form", "completed", curves=curves, about=ABOUT)
    path = model_card.write(tmp_path, result, OmegaConf.create({"method": {"_target_": "m"}}), FACTS)
    text = path.read_text()
    assert "| task | 1 | 10 | 100 | 1,000 | 10,000 | 100,000 | 1,000,000 |" in text
    assert "| harmful, after | 0.100 | 0.200 | 0.300 | 0.400 | 0.500 | 0.600 | 0.600 |" in text
    assert "| harmful, before | 0.250 | 0.250 | 0.250 | 0.750 | 0.750 | 0.750 | 0.750 |" in text
    assert text.index("harmful, before") < text.index("harmful, after")
    assert "primary, after" not in text
