"""Recipes and the paper's numbers."""

import dataclasses
import math

import pytest

from isda.experiments.errors import InputError, unknown
from isda.experiments.files import write_text
from isda.experiments.published import COST, DASH, PARAMETERS, PUBLISHED, TABLES, Cell, Result
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.recipes import DEFAULT, RECIPES, Start, baseline_of, get_recipe, name_of
from isda.experiments.settings import Recipe

CIFAR_NETWORKS = 10
TABLE_3_NETWORKS = 3
IMAGENET_NETWORKS = 7
TABLE_4 = ("large_margin", "disturb_label", "focal", "center", "lq")
OTHERS = (*TABLE_4, "label_smoothing")
GANS = ("wgan", "cgan", "acgan", "infogan")
TABLE_5 = {
    "identity": {"covariance": "identity"},
    "diagonal": {"covariance": "diagonal"},
    "shared": {"covariance": "shared"},
    "constant": {"ramp": "constant"},
}


def plain(**changes) -> Recipe:
    fields = {"data": "digits", "network": "resnet8", "epochs": 10, "batch_size": 4}
    return Recipe(**{**fields, "learning_rate": 0.1, "weight_decay": 0.0, **changes})


def test_names_and_counts():
    cifar = CIFAR_NETWORKS * 2 + TABLE_3_NETWORKS * 4 + 2 * len(TABLE_4) + 2 + len(TABLE_5)
    smoothed = 1 + 2 * CIFAR_NETWORKS
    assert len(RECIPES) == 2 + 2 * cifar + IMAGENET_NETWORKS * 2 + smoothed + 4 * 3 + 2
    for name, recipe in RECIPES.items():
        data, network, method = name.split("-")
        assert (data, network) == (recipe.data, recipe.network)
        assert method.endswith("isda") == (recipe.method == "isda")
        assert ("autoaugment" in method) == ("autoaugment" in recipe.augment)
        assert (method.partition("_")[0] in ("cutout", "autoaugment")) == (
            "cutout" in recipe.augment
        )
        assert recipe.generator == (method if method in GANS else "none")
        assert recipe.synthetic == (1 / 6 if method in GANS else 0)
        assert (method in OTHERS) == (method == recipe.method != "ce" and method != "isda")
        if method.removesuffix("_isda") in TABLE_5:
            ablation = {"covariance": "full", "ramp": "epoch", **TABLE_5[method[:-5]]}
            assert (recipe.covariance, recipe.ramp) == tuple(ablation.values())
    assert DEFAULT in RECIPES
    assert (RECIPES[DEFAULT].precision, RECIPES[DEFAULT].compile) == ("fp32", False)


def test_a_baseline_differs_in_the_loss_alone():
    isda = [name for name in RECIPES if name.endswith("isda")]
    for name in isda:
        changed = differing_fields(RECIPES[baseline_of(name)], RECIPES[name])
        assert changed.pop("method") == ("ce", "isda")
        assert changed.pop("lambda_0") == (0.0, RECIPES[name].lambda_0)
        assert changed.keys() <= {"covariance", "ramp"}, name
    others = {name for name in RECIPES if name.rpartition("-")[2] in (*OTHERS, *GANS)}
    assert {baseline_of(name) for name in isda} | set(isda) | others == set(RECIPES)
    with pytest.raises(InputError, match="resnet32-ce"):
        baseline_of("cifar10-resnet32-ce")


def test_unknown_recipe_names_near_ones():
    with pytest.raises(InputError, match="cifar10-resnet32-isda"):
        get_recipe("cifar10-resnet23-isda")


def test_unknown_names_without_near_ones():
    assert str(unknown("mode", "xyz", ["a", "b"])) == "unknown mode 'xyz'; choose from a, b"
    assert str(unknown("mode", "xyz", [])) == "unknown mode 'xyz'"
    assert str(unknown("mode", "xyz", map(str, range(9)))) == "unknown mode 'xyz'"  # too many


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # (epoch counted from 0, learning rate), around every change that Appendix B prints
        ("cifar100-resnet32-ce", {0: 0.1, 78: 0.1, 79: 0.01, 118: 0.01, 119: 0.001, 159: 0.001}),
        ("cifar10-se_resnet110-isda", {158: 1e-3, 159: 1e-4, 199: 1e-4}),
        (
            "cifar100-wide_resnet28_10-cutout",
            {58: 0.1, 59: 0.02, 118: 0.02, 119: 4e-3, 158: 4e-3, 159: 8e-4, 199: 1.6e-4},
        ),
        ("cifar10-densenet_bc190_40-ce", {148: 0.1, 149: 0.01, 199: 0.001, 249: 0.0001}),
        ("cifar10-resnext29_8x64d-ce", {148: 0.05, 149: 0.005, 223: 0.005, 224: 5e-4, 299: 5e-5}),
    ],
)
def test_step_schedule(name, expected):
    recipe = get_recipe(name)
    for epoch, rate in expected.items():
        assert recipe.learning_rate_at(epoch) == pytest.approx(rate, rel=1e-12)


def test_step_schedule_against_a_loop_that_multiplies():
    for recipe in RECIPES.values():
        if recipe.schedule == "step":
            rate = recipe.learning_rate
            for number in range(1, recipe.epochs + 1):  # epochs as the paper counts them
                if number in recipe.milestones:
                    rate *= recipe.gamma
                assert recipe.learning_rate_at(number - 1) == pytest.approx(rate, rel=1e-12)


def test_cosine_schedules():
    shake, imagenet = (
        get_recipe("cifar10-shake_shake26_2x32d-ce"),
        get_recipe("imagenet-resnet50-ce"),
    )
    assert shake.learning_rate_at(1799) == 0.0  # the last epoch of the authors' CIFAR code
    assert shake.learning_rate_at(899) == pytest.approx(0.05)
    assert imagenet.learning_rate_at(0) == 0.2
    assert imagenet.learning_rate_at(150) == pytest.approx(0.1)
    # cos(π(1 − x)) = −cos(πx): the last epoch is as far from 0 as the second is from 0.2
    assert imagenet.learning_rate_at(299) == pytest.approx(0.2 - imagenet.learning_rate_at(1))
    rates = [shake.learning_rate_at(epoch) for epoch in range(1800)]
    assert rates == sorted(rates, reverse=True)
    assert plain(cosine_offset=3, epochs=2).learning_rate_at(1) == 0.0  # does not rise again


@pytest.mark.parametrize("ramp", ["epoch", "step"])
def test_ramps(ramp):
    assert [plain(ramp=ramp).progress_at(epoch) for epoch in (0, 7)] == [0.0, pytest.approx(0.7)]
    assert plain(ramp="constant").progress_at(0) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("synthetic", 0.1, "0 with generator none"),
        ("synthetic", 1.0, ">= 0 and < 1"),
        ("generator", "wgan", "> 0 with generator wgan"),
        ("generator", "gan", "one of none, wgan"),
        ("epochs", 0, "epochs must be >= 1, got 0"),
        ("batch_size", 0, "batch_size must be >= 1"),
        ("learning_rate", 0.0, "learning_rate must be > 0"),
        ("learning_rate", math.nan, "learning_rate must be > 0, got nan"),
        ("lambda_0", -1.0, r"lambda_0 must be >= 0, got -1\.0"),
        ("lambda_0", math.inf, "lambda_0 must be >= 0"),
        ("milestones", (8, 8), "milestones must be >= 1 and increasing"),
        ("milestones", (0, 8), "milestones must be >= 1 and increasing"),
        ("momentum", 1.0, "momentum must be >= 0 and < 1"),
        ("momentum", 0.0, "momentum must be > 0 with nesterov"),
        ("gamma", 0.0, "gamma must be > 0 and <= 1"),
        ("decay", 1.5, "decay must be > 0 and <= 1"),
        ("augment", ("crop", "mixup"), "augment must be distinct names out of crop"),
        ("augment", ("crop", "crop"), "distinct names out of"),
        ("schedule", "linear", "schedule must be one of step, cosine, got 'linear'"),
        ("data", "", "data must be non-empty"),
        ("hold_out", -1, "hold_out must be >= 0"),
        ("images_per_class", -1, "images_per_class must be >= 0"),
    ],
)
def test_refused_values(field, value, message):
    with pytest.raises(InputError, match=message):
        plain(**{field: value})


def test_lambda_0_is_refused_where_it_does_nothing():
    with pytest.raises(InputError, match="lambda_0 must be 0 with method ce"):
        plain(method="ce", lambda_0=0.5)


def test_dict_round_trip():
    for recipe in RECIPES.values():
        assert Recipe.from_dict(recipe.as_dict()) == recipe
    with pytest.raises(InputError, match="'epoch'; did you mean epochs"):
        Recipe.from_dict({**plain().as_dict(), "epoch": 3})
    fields = plain().as_dict()
    del fields["network"]
    with pytest.raises(InputError, match="network"):
        Recipe.from_dict(fields)


def test_names_of_users_recipes_are_folder_names():
    recipe = plain(data="imagefolder:/data/my-birds/", network="timm:a/b.c", augment=("cutout",))
    assert name_of(recipe) == "my_birds-timm_a_b.c-cutout_isda"
    assert baseline_of(name_of(recipe)) == name_of(recipe.baseline())


def test_names_that_are_too_long_for_files(tmp_path):
    for length in (228, 229):
        recipe = plain(data=f"imagefolder:{'x' * length}", lambda_0=0.5)
        if length == 228:  # the longest name of a file has 255 bytes
            name = Start(recipe).run_name(recipe)
            assert len(f"{name}.lambda_0.json") == 255
            for kind in ("html", "search.json", "lambda_0.json"):
                write_text(tmp_path / f"{name}.{kind}", "text")
            assert len([*tmp_path.iterdir()]) == 3
        else:
            with pytest.raises(InputError, match="name of the run must have at most 241 bytes"):
                Start(recipe).run_name(recipe)


def test_published_numbers_belong_to_recipes():
    assert set(PUBLISHED) <= set(RECIPES)
    # 7 networks of Table 1, 8 of Table 2 on two data sets, 3 of Table 3 on two, in pairs
    # then five methods and four GANs of Table 4 in four columns, but WGAN in two, and ResNet-110
    # with dropout, and Table 5
    assert len(PUBLISHED) == 7 * 2 + 8 * 2 * 2 + 3 * 2 * 4 + 5 * 4 + 4 * 4 - 2 + 2 * 2 + 4 * 2
    ours = {name for name in RECIPES if name.endswith("label_smoothing")}
    missing = {name.split("-")[1] for name in set(RECIPES) - set(PUBLISHED) - ours}
    assert missing == {"resnet8", "shake_shake26_2x32d", "shake_shake26_2x112d"}
    networks = {name.split("-")[1] for name in PUBLISHED}
    assert networks - set(PARAMETERS) == {"shake_shake26_2x32d", "shake_shake26_2x112d"}
    assert {name.split("-")[1] for name in PUBLISHED if name.startswith("imagenet")} == set(COST)


def test_isda_is_better_in_every_published_pair():
    for name, result in PUBLISHED.items():
        if name.endswith("isda"):
            baseline = PUBLISHED[baseline_of(name)]
            if name != "cifar100-wide_resnet28_10-identity_isda":  # 18.53, as the baseline
                assert result.mean < baseline.mean, name
            if name.startswith("imagenet"):
                assert result.top5 is not None
                assert baseline.top5 is not None
                assert result.top5 < baseline.top5


def test_gains_that_the_paper_states():
    def gain(name: str) -> float:
        return round(PUBLISHED[baseline_of(name)].mean - PUBLISHED[name].mean, 2)

    brackets = {"resnet50": 1.1, "resnet101": 0.9, "resnet152": 1.0, "densenet121": 0.5}
    brackets |= {"densenet265": 0.7, "resnext50_32x4d": 1.2, "resnext101_32x8d": 1.0}
    assert {network: gain(f"imagenet-{network}-isda") for network in brackets} == brackets
    assert gain("cifar100-shake_shake26_2x112d-autoaugment_isda") == 1.34
    assert gain("cifar100-wide_resnet28_10-autoaugment_isda") == 0.98
    # stated as "nearly 0.7 %"
    assert gain("cifar100-wide_resnet28_10-isda") == 0.55
    assert gain("cifar100-resnext29_8x64d-isda") == 0.73


def printed(table: int, title: str) -> list[Result | str]:
    """Row of a table by its title: numbers and dashes."""
    (row,) = (row for row in TABLES[table].rows if row[0] == title)
    return [entry.paper if isinstance(entry, Cell) else entry for entry in row[1:]]


def test_table_4_repeats_table_2_and_table_5_does_not():
    assert len(TABLES[4].cells) == 13 * 4 - 2 - 2 * 2
    resnet110, with_isda = printed(2, "ResNet-110")[1:], printed(2, "ResNet-110 + ISDA")[1:]
    assert printed(4, "Basic") == [*resnet110, DASH, DASH]
    assert printed(4, "ISDA") == [*with_isda, DASH, DASH]
    for title, name in (("Basic", "Wide-ResNet-28-10"), ("ISDA", "Wide-ResNet-28-10 + ISDA")):
        assert printed(4, f"{title} + Dropout")[2:] == printed(2, name)[1:]
    for title, method in (("Basic", "ce"), ("ISDA", "isda")):
        for place, data in enumerate(("cifar10", "cifar100")):
            assert printed(4, title)[place] == PUBLISHED[f"{data}-resnet110-{method}"]
            wide = PUBLISHED[f"{data}-wide_resnet28_10-{method}"]
            assert printed(4, f"{title} + Dropout")[2 + place] == wide
    # the text gives ISDA the numbers of Basic + Dropout
    text = [6.23, 27.11]
    assert [result.mean for result in printed(4, "Basic + Dropout")[:2]] == text
    assert all(one.mean > n for one, n in zip(printed(4, "ISDA")[:2], text, strict=True))
    assert printed(5, "ISDA")[1] == PUBLISHED["cifar100-wide_resnet28_10-isda"]
    assert printed(5, "Basic")[0] == PUBLISHED["cifar10-wide_resnet28_10-ce"]
    assert printed(5, "Basic")[1].mean == 18.58
    assert PUBLISHED["cifar100-wide_resnet28_10-ce"].mean == 18.53


def test_recipes_of_tables_4_and_5():
    for data in ("cifar10", "cifar100"):
        for network in ("resnet110", "wide_resnet28_10"):
            plain = get_recipe(f"{data}-{network}-ce")
            for method in TABLE_4:
                changed = differing_fields(plain, get_recipe(f"{data}-{network}-{method}"))
                noise = 0.1 if (data, network) == ("cifar100", "resnet110") else 0.05
                expected = {"noise_rate": (0.0, noise)} if method == "disturb_label" else {}
                assert changed == {"method": ("ce", method), **expected}
        for method in ("ce", "isda"):
            name = "dropout" if method == "ce" else "dropout_isda"
            changed = differing_fields(
                get_recipe(f"{data}-resnet110-{method}"), get_recipe(f"{data}-resnet110-{name}")
            )
            assert changed == {"drop_rate": (0.0, 0.3)}
        isda = get_recipe(f"{data}-wide_resnet28_10-isda")
        for name, changes in TABLE_5.items():
            ablation = get_recipe(f"{data}-wide_resnet28_10-{name}_isda")
            assert ablation == dataclasses.replace(isda, **changes)


def test_settings_stated_by_the_paper_and_its_code():
    for name, recipe in RECIPES.items():
        if recipe.data == "imagenet":
            assert (recipe.nesterov, recipe.augment) == (False, ())
            assert recipe.covariance == ("diagonal" if recipe.method == "isda" else "full")
        elif recipe.data != "digits":
            assert recipe.nesterov
            assert recipe.augment[:2] == ("crop", "flip")
        dropout = recipe.network == "wide_resnet28_10" or "dropout" in name
        assert recipe.drop_rate == (0.3 if dropout else 0.0), name
        assert recipe.hold_out == 0
    strengths = {
        recipe.network: recipe.lambda_0
        for recipe in RECIPES.values()
        if recipe.data == "imagenet" and recipe.method == "isda"
    }
    assert strengths.pop("resnet101") == 5.0
    assert {strengths.pop(name) for name in ("densenet121", "densenet265")} == {1.0}
    assert set(strengths.values()) == {7.5}
