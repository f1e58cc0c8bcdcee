"""The pytest plugin in suites of others, present, used and unused, each in a process of its own."""

import sys

import pytest

pytest_plugins = ["pytester"]

BARE = ("-W", "error", "-p", "no:cacheprovider", "-p", "no:celery", "-p", "no:ddtrace", "-p", "no:docker_tools")
"""Without what else is installed here; pytest-celery imports Celery in every run."""

SHOP = """
from celery import Celery
from celery_idempotent import current_attempt, IdempotentTask, Policy

app = Celery("shop", broker="redis://127.0.0.1:1", backend="redis://127.0.0.1:1")
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, idempotency_store="dynamodb://@eu-west-1/real")
charges = {}
outbox = []

@app.task(base=IdempotentTask, bind=True, idempotent=Policy(key="order_id"))
def charge(self, order_id, cents):
    charges[current_attempt().effect_key("charge")] = cents
    return "ch_1"

@app.task(base=IdempotentTask, idempotent=Policy(key="address"))
def mail(address):
    outbox.append(address)
"""


def test_unused_plugin_imports_nothing(pytester: pytest.Pytester) -> None:
    """In a suite that asks for no fixture of it, the plugin is there, and neither Celery nor a driver is."""
    pytester.makepyfile(
        """
        import sys

        def test_nothing(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("celery_idempotent")
            roots = {name.partition(".")[0] for name in sys.modules}
            assert not roots & {"celery", "kombu", "boto3", "botocore", "redis", "sqlalchemy", "celery_idempotent"}
        """
    )
    pytester.runpytest_subprocess(*BARE).assert_outcomes(passed=1)


def test_program_that_imported_the_package_can_run_pytest(pytester: pytest.Pytester) -> None:
    """pytest marks the packages of plugins for its assertions, and warns if one of them is imported already."""
    pytester.makepyfile(
        test_nothing="def test_nothing(): ...",
        program=f"""
        import sys
        import celery_idempotent, pytest

        class Installed:
            "What pytest does to the package of an installed plugin; here it is installed for development."

            def pytest_configure(self, config):
                config.pluginmanager.rewrite_hook.mark_rewrite("celery_idempotent")

        sys.exit(pytest.main([*{BARE!r}, "test_nothing.py"], plugins=[Installed()]))
        """,
    )
    pytester.run(sys.executable, "program.py").assert_outcomes(passed=1)


def test_suite_of_a_shop_has_a_store_for_each_test_and_a_readable_report(pytester: pytest.Pytester) -> None:
    """A new store for every app, also in the worker of Celery's fixtures; a failure is told in the user's words."""
    pytester.makepyfile(
        shop=SHOP,
        test_shop="""
        import pytest
        from celery import Celery
        from celery_idempotent import IdempotentTask, Policy, StoreUnavailable, idempotent
        from celery_idempotent.integration.settings import runtime_of
        from celery_idempotent.testing import assert_effect_once
        from shop import app, charge, charges, mail, outbox

        pytest_plugins = ["celery.contrib.pytest"]
        runs = []
        NOWHERE = "redis://127.0.0.1:1/0"
        broken = Celery("broken", config_source="no.such.module")

        class Settings:
            CELERY_IDEMPOTENCY_STORE = "memory://"

        namespaced = Celery("namespaced")
        namespaced.config_from_object(Settings, namespace="CELERY")

        @idempotent(Policy("order"), app=app)
        def bill(order):
            return 1

        @idempotent(Policy("order"), store=NOWHERE)
        def ship(order):
            return 2

        def made_later():
            later = Celery("later", config_source={"idempotency_store": NOWHERE, "task_acks_late": True,
                                                   "task_reject_on_worker_lost": True})

            @later.task(base=IdempotentTask)
            def pack(order):
                return 3

            return pack

        @pytest.mark.parametrize("run", [1, 2])
        def test_all(run, celery_app, idempotency_store):
            assert celery_app.conf.idempotency_store is app.conf.idempotency_store is idempotency_store
            assert runtime_of(namespaced).store is idempotency_store
            assert idempotency_store.records == []
            before = len(charges)
            assert [charge.apply(("o", 5)).get() for _ in range(2)] == ["ch_1", "ch_1"]
            assert len(charges) - before == (1 if run == 1 else 0)  # one key, whatever the store remembers
            (record,) = idempotency_store.records
            assert (record.key, record.status) == (charge.idempotency_key_for("o", 5), "COMPLETED")
            assert (bill("o"), ship("o")) == (1, 2)
            assert made_later().apply(("o",)).get() == 3
            assert len(idempotency_store.records) == 4

        def test_it_obeys(idempotency_store):
            for later, sent in ((0, 1), (6 * 86_400, 1), (86_401, 2)):
                idempotency_store.advance(later)
                mail.apply(("a@b",))
                assert outbox == ["a@b"] * sent
            idempotency_store.faults.extend(["request lost", "request lost"])
            with pytest.raises(StoreUnavailable):
                mail.apply(("c@d",)).get()
            assert "c@d" not in outbox

        def test_none():
            assert app.conf.idempotency_store == "dynamodb://@eu-west-1/real"
            assert "real" in repr(runtime_of(app).store)
            assert namespaced.conf.idempotency_store == repr(runtime_of(namespaced).store) == "memory://"
            with pytest.raises(Exception, match="redis"):
                ship("o")

        @pytest.fixture(scope="session")
        def celery_config():
            return {"broker_url": "memory://", "result_backend": "cache+memory://", "task_acks_late": True,
                    "task_reject_on_worker_lost": True}

        @pytest.fixture(scope="session")
        def celery_worker_parameters():
            return {"perform_ping_check": False, "shutdown_timeout": 30}

        @pytest.mark.filterwarnings("default")
        def test_duplicates(celery_app, idempotency_store, celery_worker):
            @celery_app.task(base=IdempotentTask, idempotent=Policy(key="order_id"))
            def ship(order_id):
                runs.append(order_id)
                return "shipped"

            celery_worker.reload()
            assert [ship.delay("o-1").get(timeout=20) for _ in range(2)] == ["shipped", "shipped"]
            assert runs == ["o-1"]
            assert [record.status for record in idempotency_store.records] == ["COMPLETED"]

        def test_mail_is_sent_once():
            assert_effect_once(mail, "c@d", effects=outbox)
        """,
    )
    result = pytester.runpytest_subprocess(*BARE, "--show-capture=no")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(
        [
            ">       assert_effect_once(mail, *",
            "E       AssertionError: the effect of shop.mail was promised exactly once; 2 of 16 scenarios broke that:",
            "E         effects  scenario * what its deliveries returned",
            "E       >       2  the worker dies as the body ends * died, None, None",
            "test_shop.py:*: AssertionError",
        ]
    )
    assert "scenarios.py" not in result.stdout.str()


def test_reports_of_all_processes_are_printed_written_and_held_to_a_threshold(pytester: pytest.Pytester) -> None:
    """Also those of tests that pass; a run in which nothing was tried does not pass for a safe one."""
    pytester.makepyfile(
        shop=SHOP,
        test_shop="""
        from shop import charge, charges, mail, outbox

        def test_charge(effect_coverage):
            report = effect_coverage(charge, args=lambda trial: (f"o-{trial}", 5), effects=lambda trial: charges)
            assert report.is_complete, report

        def test_mail(effect_coverage):
            report = effect_coverage(mail, args=lambda trial: (f"a-{trial}",), effects=lambda trial: outbox)
            assert report.is_complete, report
        """,
    )
    options = ("-n", "2", "--effect-coverage", "--effect-coverage-html=pages")
    result = pytester.runpytest_subprocess(*BARE, "--show-capture=no", *options, "--effect-coverage-fail-under=95")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.re_match_lines(
        [
            r"E +AssertionError: shop.mail: 50 % of 2 deaths are safe",
            r"E .* 16 +outbox.append\(address\)  died after: 2x instead of 1x",
            "=+ effect coverage =+",
            "pages: pages.index.html",
            r"FAILED: 83 % of 6 deaths are safe; --effect-coverage-fail-under=95",
        ]
    )
    assert "shop.charge: 100 % of 4 deaths are safe" in result.stdout.str()
    pages = sorted(path.name for path in (pytester.path / "pages").iterdir())
    assert pages == ["1.html", "2.html", "index.html"]
    assert "died after: 2x instead of 1x" in "".join(path.read_text() for path in (pytester.path / "pages").iterdir())
    for arguments, told in ((("-k", "nothing"), "no task was tried"), ((), "must be a number from 0 to 100")):
        ended = pytester.runpytest_subprocess(
            *BARE, *arguments, f"--effect-coverage-fail-under={1 if arguments else 101}"
        )
        assert (ended.ret != 0, told in ended.stdout.str() + ended.stderr.str()) == (True, True)
