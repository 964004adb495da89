"""What is rewritten of a template's source, and what only looks like it."""

import pytest

from gateway.text.template_source import rewritten


@pytest.mark.parametrize(
    ("source", "becomes"),
    [
        ("{% if a is iterable %}", "{% if a |default('') is iterable %}"),
        ("{% if a.b[0] is not sequence %}", "{% if a.b[0] |default('') is not sequence %}"),
        ("{{- a|length }}", "{{- a|default('') |length }}"),
        ("{{ (a | first).b | count }}", "{{ (a |default('') | first).b |default('') | count }}"),
        ("{{ 'x' ~ a|length ~ \"y\" }}", "{{ 'x' ~ a|default('') |length ~ \"y\" }}"),
        ("{%- generation -%}x{% endgeneration %}", "{%- if true -%}x{% endif %}"),
        ("{% raw %}\nx{% endraw %}\n", "{% raw %}\n\nx{% endraw %}\n"),
    ],
)
def test_rewritten(source: str, becomes: str) -> None:
    assert rewritten(source) == becomes


@pytest.mark.parametrize(
    "source",
    [
        "a is iterable, a|length",
        "{# a is iterable #}{#- a|length -#}",
        "{{ 'a is iterable' ~ \"x|length\" }}",
        "{{ 'it\\'s |length' }}",
        "{% raw %}{{ a|length }}{% endraw %}",
        "{{ a|map('length') }}{{ a.length }}{{ loop.first }}",
        "{{ a|lengthy }}{% if a is iterables %}{% endif %}",
        "it's {{ a }} and |length isn't",
    ],
)
def test_left_alone(source: str) -> None:
    assert rewritten(source) == source
