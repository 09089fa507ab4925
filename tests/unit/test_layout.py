"""From table maps and schemas to layouts: which column is which, how it is read, and what proves
it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import pytest

from cdc_relay.binlog import rows
from cdc_relay.binlog.charsets import codec_of
from cdc_relay.binlog.layout import (
    LayoutResolver,
    MappedColumn,
    SchemaColumn,
    assign,
    build,
    fits,
    parse_table_map,
    reader_for,
    reading,
    row_images,
)
from cdc_relay.binlog.rows import Column, Layout, UnreadRow, decode_rows
from cdc_relay.errors import SourceError
from cdc_relay.outbox import OutboxEvent
from tests.support.binlog import COLUMNS, images
from tests.support.corpus import FLAVORS, Corpus

FIELDS = {name: name for name in OutboxEvent._fields}


def column(name: str, kind: str, **options: object) -> SchemaColumn:
    values: dict[str, object] = {
        "column_type": kind, "charset": None, "octets": None, "precision": None, "scale": None,
        "fraction": None, **options,
    }  # fmt: skip
    return SchemaColumn(name, kind, **values)  # type: ignore[arg-type]


def shape(
    types: Sequence[int], metas: bytes, optional: bytes = b"", table: str = "outbox_event"
) -> bytes:
    """A table map from the schema's name on."""
    out = b"\4shop\0" + bytes([len(table)]) + table.encode() + b"\0"
    out += bytes([len(types)]) + bytes(types) + bytes([len(metas)]) + metas
    return out + bytes((len(types) + 7) // 8) + optional


# --- table maps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", FLAVORS)
def test_recorded_table_maps(flavor: str) -> None:
    corpus = Corpus.load(flavor)
    names = [column.name for column in corpus.columns]
    seen = set()
    for event in corpus.events:
        if event[4] != 19 or b"outbox_event\0" not in event:
            continue
        body = event[27 : len(event) - 4 * (b"unsummed" not in event)]
        try:
            mapped = parse_table_map(body, mariadb=flavor == "mariadb")
        except (ValueError, IndexError):
            continue  # of the part without checksums
        if len(mapped) != len(names):
            continue  # the table had another column for a while
        assert all(fits(*pair) for pair in zip(mapped, corpus.columns, strict=True))
        named = mapped[0].name is not None
        seen.add(named)
        if named:
            assert [column.name for column in mapped] == names
            assert mapped[0].unsigned is True
            assert corpus.charsets[mapped[1].collation or 0] == "utf8mb4"
    assert seen == {False, True}


def test_the_width_of_each_type() -> None:
    types = [1, 2, 9, 3, 8, 4, 5, 13, 10, 7, 12, 14, 11, 17, 18, 19, 246, 16, 254, 254, 254, 15, 15,
             252, 245, 242, 255]  # fmt: skip
    metas = bytes(
        [4, 8, 3, 6, 1, 20, 9, 3, 2, 0xF7, 2, 0xF8, 8, 0xFE, 30, 255, 0, 0, 1, 3, 4, 4, 4]
    )
    widths = [1, 2, 3, 4, 8, 4, 8, 1, 3, 4, 8, 3, 3, 6, 8, 4, 9, 3, 2, 8, -1, -1, -2, -3, -4, -4]
    widths.append(-4)
    mapped = parse_table_map(shape(types, metas), mariadb=False)
    assert [column.width for column in mapped] == widths


def test_a_long_char_has_two_bits_of_its_length_in_its_type() -> None:
    [mapped] = parse_table_map(shape([254], bytes([0xCE, 0xFC])), mariadb=False)
    assert (mapped.type, mapped.meta, mapped.width) == (254, 1020, -2)


def test_a_type_that_nobody_knows_is_an_error() -> None:
    [mapped] = parse_table_map(shape([99], b""), mariadb=False)
    with pytest.raises(SourceError, match="type that is not known: 99"):
        _ = mapped.width


def charset_fields(numbers: Sequence[int]) -> bytes:
    return bytes([3, len(numbers), *numbers])


@pytest.mark.parametrize(
    ("mariadb", "types", "metas", "collations"),
    [
        # What has a character set on either server: MySQL's vector, MariaDB's geometry and
        # compressed columns.
        (False, [15, 242, 15], b"\5\0\4\5\0", [8, 63, 9]),
        (False, [15, 255, 15], b"\5\0\4\5\0", [8, 9]),
        (True, [15, 255, 15], b"\5\0\4\5\0", [8, 63, 9]),
        (True, [15, 140, 15], b"\5\0\2\5\0", [8, 63, 9]),
        (True, [15, 141, 15], b"\5\0\5\0\5\0", [8, 63, 9]),
        (False, [15, 245, 15], b"\5\0\4\5\0", [8, 9]),
    ],
)
def test_each_character_set_stands_at_its_own_column(
    mariadb: bool, types: list[int], metas: bytes, collations: list[int]
) -> None:
    mapped = parse_table_map(shape(types, metas, charset_fields(collations)), mariadb=mariadb)
    assert (mapped[0].collation, mapped[2].collation) == (8, 9)


def test_a_default_character_set_with_exceptions() -> None:
    # 46 for all but the second string, which has 255 + 3 (a length of its own).
    optional = bytes([2, 5, 46, 1, 252, 2, 1])
    mapped = parse_table_map(shape([15, 3, 15, 252], b"\5\0\5\0\2", optional), mariadb=False)
    assert [column.collation for column in mapped] == [46, None, 258, 46]


def test_signs_stand_at_their_own_columns() -> None:
    """A bit for each number, YEAR included, the first in the highest bit."""
    types = [8, 15, 13, 3, 246, 5, 16, 1, 2, 9, 8]
    metas = b"\5\0" + b"\5\2" + b"\x08" + b"\1\0"
    optional = bytes([1, 2, 0b1110_0101, 0b1000_0000])
    mapped = parse_table_map(shape(types, metas, optional), mariadb=False)
    assert [column.unsigned for column in mapped] == [
        True, None, True, True, False, False, None, True, False, True, True,
    ]  # fmt: skip


def test_labels_stand_at_their_own_columns() -> None:
    """Those of all ENUMs, those of all SETs, and the character sets of both in one list."""
    types, metas = [254, 15, 254, 254], b"\xf7\1" + b"\5\0" + b"\xf8\1" + b"\xf7\1"
    sets = bytes([5, 5, 2]) + b"\1x\1y"
    enums = bytes([6, 9, 1]) + b"\2\xe4b" + bytes([2]) + b"\1c\1d"
    charsets = bytes([2, 1, 46, 11, 3, 8, 28, 97])
    for optional in (sets + enums + charsets, charsets + enums + sets):
        mapped = parse_table_map(shape(types, metas, optional), mariadb=False)
        assert [item.labels for item in mapped] == [
            (b"\xe4b",), None, (b"x", b"y"), (b"c", b"d"),
        ]  # fmt: skip
        assert [item.collation for item in mapped] == [8, 46, 28, 97]
    optional = sets + enums + bytes([10, 3, 8, 1, 28])
    mapped = parse_table_map(shape(types, metas, optional), mariadb=False)
    assert [item.collation for item in mapped] == [8, None, 28, 8]


def test_unknown_fields_of_a_table_map_are_passed_over() -> None:
    optional = bytes([77, 3, 1, 2, 3]) + bytes([4, 6, 2]) + b"id" + b"\2nm" + bytes([12, 1, 0])
    mapped = parse_table_map(shape([8, 15], b"\5\0", optional), mariadb=False)
    assert [column.name for column in mapped] == ["id", "nm"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_cut_table_maps_are_errors_or_have_fewer_fields(cut: int) -> None:
    whole = shape([8, 15, 252], b"\5\0\2", charset_fields([8, 9]) + bytes([1, 1, 0x80]))
    try:
        mapped = parse_table_map(whole[:-cut], mariadb=False)
    except (ValueError, IndexError):
        return
    assert [item.type for item in mapped] == [8, 15, 252]


# --- which column is which ------------------------------------------------------------------------

VARCHAR = MappedColumn(15, 256)
BIGINT = MappedColumn(8, 0)
_ID = column("id", "bigint")
_TEXT = column("text", "varchar", octets=256, charset="utf8mb4")


def test_by_name_where_the_log_has_names() -> None:
    mapped = [MappedColumn(15, 256, "Text"), MappedColumn(8, 0, "ID"), MappedColumn(8, 0, "gone")]
    found = assign(mapped, [_ID, _TEXT])
    assert found is not None
    assert found[1] is True
    assert [None if item is None else item.name for item in found[0]] == ["text", "id", "gone"]


def test_by_place_where_it_has_none() -> None:
    assert assign([BIGINT, VARCHAR], [_ID, _TEXT]) == ([_ID, _TEXT], False)


@pytest.mark.parametrize(
    ("mapped", "found"),
    [
        ([BIGINT, VARCHAR, MappedColumn(8, 0)], [_ID, _TEXT, None]),  # MariaDB's hash
        ([MappedColumn(15, 9), BIGINT, VARCHAR], [None, _ID, _TEXT]),  # a hidden key
        ([BIGINT], None),
        ([VARCHAR, BIGINT], None),
        ([BIGINT, MappedColumn(15, 255)], None),
        ([BIGINT, MappedColumn(15, 9), VARCHAR], None),
    ],
)
def test_columns_that_only_the_log_shows(
    mapped: list[MappedColumn], found: list[SchemaColumn | None] | None
) -> None:
    assigned = assign(mapped, [_ID, _TEXT])
    assert (None if assigned is None else assigned[0]) == found


@pytest.mark.parametrize(
    ("mapped", "schema", "same"),
    [
        (MappedColumn(252, 2), column("c", "text"), True),
        (MappedColumn(252, 3), column("c", "text"), False),
        (MappedColumn(252, 4), column("c", "longtext"), True),
        (MappedColumn(252, 4), column("c", "json"), True),
        (MappedColumn(245, 4), column("c", "json"), True),
        (MappedColumn(245, 4), column("c", "longtext"), False),
        (MappedColumn(18, 6), column("c", "datetime", fraction=6), True),
        (MappedColumn(18, 3), column("c", "datetime", fraction=6), False),
        (MappedColumn(18, 0), column("c", "datetime"), True),
        (MappedColumn(18, 6), column("c", "timestamp", fraction=6), False),
        (MappedColumn(246, 2 << 8 | 10), column("c", "decimal", precision=10, scale=2), True),
        (MappedColumn(246, 2 << 8 | 10), column("c", "decimal", precision=10, scale=3), False),
        (MappedColumn(254, 16), column("c", "binary", octets=16), True),
        (MappedColumn(254, 16), column("c", "binary", octets=17), False),
        (MappedColumn(254, 16), column("c", "uuid"), True),
        (MappedColumn(8, 0), column("c", "uuid"), False),
        (MappedColumn(3, 0), column("c", "bigint"), False),
        (MappedColumn(248, 1), column("c", "set"), True),
    ],
)
def test_what_a_column_can_be(mapped: MappedColumn, schema: SchemaColumn, same: bool) -> None:
    assert fits(mapped, schema) == same


# --- how it is read -------------------------------------------------------------------------------

_CHARSETS = {8: "latin1", 28: "gbk", 46: "utf8mb4", 63: "binary", 97: "eucjpms"}


@pytest.mark.parametrize(
    ("collation", "charset", "kind", "codec"),
    [
        (46, "latin1", rows.TEXT, ""),  # what the log says goes before what the schema says
        (8, "utf8mb4", rows.TEXT_CODEC, "mysql_latin1"),
        (28, None, rows.TEXT_CODEC, "gbk"),
        (63, None, rows.TEXT, ""),
        (97, None, rows.READ_BACK, "character set eucjpms"),
        (999, None, rows.READ_BACK, "character set unknown"),
        (None, "utf8mb3", rows.TEXT, ""),
        (None, "ascii", rows.TEXT_CODEC, "ascii"),
        (None, "koi8r", rows.TEXT_CODEC, "koi8_r"),
        (None, None, rows.TEXT, ""),
    ],
)
def test_text_is_read_in_its_character_set(
    collation: int | None, charset: str | None, kind: int, codec: str
) -> None:
    logged = MappedColumn(15, 256, collation=collation)
    found = reading("aggregate_id", logged, column("c", "varchar", charset=charset), _CHARSETS)
    assert (found.kind, found.codec, found.width) == (kind, codec, -2)


@pytest.mark.parametrize(
    ("field", "logged", "schema", "kind"),
    [
        ("payload", MappedColumn(245, 4), column("c", "json"), rows.JSON),
        ("payload", MappedColumn(252, 2), column("c", "text", charset="utf8mb4"), rows.RAW),
        ("payload", MappedColumn(252, 2), column("c", "text", charset="latin1"), rows.RAW_CODEC),
        ("payload", MappedColumn(252, 2), column("c", "blob"), rows.RAW),
        ("payload", MappedColumn(254, 16), column("c", "binary"), rows.RAW_PADDED),
        ("payload", MappedColumn(3, 0), column("c", "int"), rows.READ_BACK),
        ("payload", MappedColumn(140, 2), column("c", "text"), rows.READ_BACK),
        ("event_id", MappedColumn(254, 16), column("c", "uuid"), rows.READ_BACK),
        ("event_id", MappedColumn(8, 0), column("c", "bigint"), rows.READER),
        ("created_at", MappedColumn(18, 6), column("c", "datetime"), rows.DATETIME2),
        ("created_at", MappedColumn(17, 0), column("c", "timestamp"), rows.TIMESTAMP2),
        ("created_at", MappedColumn(12, 0), column("c", "datetime"), rows.READ_BACK),
        ("id", MappedColumn(3, 0), column("c", "int"), rows.INTEGER),
    ],
)
def test_each_field_in_its_own_way(
    field: str, logged: MappedColumn, schema: SchemaColumn, kind: int
) -> None:
    assert reading(field, logged, schema, _CHARSETS).kind == kind


def test_an_id_that_is_no_number() -> None:
    with pytest.raises(SourceError, match="id column c is not an integer"):
        reading("id", VARCHAR, column("c", "varchar"), {})


@pytest.mark.parametrize(("logged", "schema"), [(True, False), (False, True), (None, True)])
def test_the_sign_of_the_log_goes_before_that_of_the_schema(
    logged: bool | None, schema: bool
) -> None:
    unsigned = schema if logged is None else logged
    kind = "bigint unsigned" if schema else "bigint"
    described = column("id", "bigint", column_type=kind)
    found = reading("id", MappedColumn(8, 0, unsigned=logged), described, {})
    assert found.argument == int(not unsigned)
    reader = reader_for(MappedColumn(8, 0, unsigned=logged), described, {})
    assert reader is not None
    assert reader(b"\xff" * 8, 0, 8) == (str(2**64 - 1) if unsigned else "-1")


def test_the_labels_of_the_log_go_before_those_of_the_schema() -> None:
    described = column("c", "enum", column_type="enum('account','order')", charset="utf8mb4")
    for labels, collation, text in (
        ((b"order", b"\xe4"), 8, ["", "order", "ä"]),
        ((b"order", "ä".encode()), 46, ["", "order", "ä"]),
        (None, None, ["", "account", "order"]),
    ):
        logged = MappedColumn(247, 1, collation=collation, labels=labels)
        reader = reader_for(logged, described, _CHARSETS)
        assert reader is not None
        assert [reader(bytes([n]), 0, 1) for n in range(3)] == text
    for labels, collation in (((b"order",), 97), ((b"order",), 999), ((b"\xe4",), 46)):
        logged = MappedColumn(247, 1, collation=collation, labels=labels)
        assert reader_for(logged, described, _CHARSETS) is None


def test_labels() -> None:
    described = column("c", "enum", column_type=r"enum('a','b''c','d\\e','f\nb','','ü,x')")
    assert described.labels == ["a", "b'c", "d\\e", "f\nb", "", "ü,x"]
    reader = reader_for(MappedColumn(247, 1), described, {})
    assert reader is not None
    assert [reader(bytes([n]), 0, 1) for n in range(4)] == ["", "a", "b'c", "d\\e"]
    with pytest.raises(ValueError, match="number 7 of 6"):
        reader(b"\7", 0, 1)
    several = reader_for(
        MappedColumn(248, 2), column("c", "set", column_type="set('a','b','c','d')"), {}
    )
    assert several is not None
    assert [several(bytes([n, 0]), 0, 2) for n in (0, 1, 10, 15)] == ["", "a", "b,d", "a,b,c,d"]
    with pytest.raises(ValueError, match="number 16 of 4"):
        several(b"\x10\0", 0, 2)
    assert column("c", "int", column_type="int('x')").labels == []
    assert reader_for(MappedColumn(247, 1), column("c", "enum", column_type=""), {}) is None


def test_what_has_no_text_of_its_own() -> None:
    for kind, schema in ((16, "bit"), (15, "varchar"), (255, "point"), (4, "float")):
        described = column("c", schema, scale=2)
        assert reader_for(MappedColumn(kind, 4), described, {}) is None


# --- character sets -------------------------------------------------------------------------------


def test_character_sets_are_read_as_the_server_reads_them() -> None:
    latin1 = codec_of("latin1")
    assert latin1 is not None
    assert bytes([0x80, 0x81, 0x8D, 0x8F, 0x90, 0x9D, 0xE9]).decode(latin1) == (
        "€\x81\x8d\x8f\x90\x9dé"
    )
    for charset, text in (("greek", "€"), ("cp1256", "ہ"), ("big5", "十"), ("ucs2", "😥")):
        codec = codec_of(charset)
        assert codec == f"mysql_{charset}"
        with pytest.raises(UnicodeDecodeError, match="reads a character of it otherwise"):
            text.encode(codec).decode(codec)
    assert "Ελληνικά".encode("iso8859_7").decode("mysql_greek") == "Ελληνικά"
    assert "次の＼\\".encode("shift_jis").decode("mysql_sjis") == "次の\\\\"
    assert "ḿ\ue7c7".encode("gb18030").decode("mysql_gb18030") == "\ue7c7ḿ"
    assert bytes([0xA1, 0xA2]).decode("mysql_greek") == "ʽʼ"
    for charset in ("eucjpms", "armscii8", "binary", "utf8mb4", "nothing"):
        assert codec_of(charset) is None
    with pytest.raises(LookupError):
        b"x".decode("mysql_nothing")


def test_a_text_that_the_server_reads_otherwise_is_read_back() -> None:
    codec = codec_of("greek")
    assert codec is not None
    layout = Layout(
        [
            Column(8, slot=0, kind=rows.INTEGER),
            Column(-1, slot=3, kind=rows.TEXT_CODEC, codec=codec),
        ],
        named=True,
        proved=True,
    )
    found: list[OutboxEvent | UnreadRow] = []
    for value in (b"\xe1\xe2", b"\xa4"):
        row = b"\x02\x03" + b"\0" + (5).to_bytes(8, "little") + bytes([len(value)]) + value
        decode_rows(row, 0, len(row), layout, found)
    assert isinstance(found[0], OutboxEvent)
    assert found[0].aggregate_id == "αβ"
    assert found[1] == UnreadRow(
        5, "aggregate_id is not mysql_greek: the server reads a character of it otherwise"
    )


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("signed", [False, True])
def test_ids_of_every_width(width: int, signed: bool) -> None:
    layout = Layout(
        [Column(width, slot=0, kind=rows.INTEGER, argument=signed)], named=True, proved=True
    )
    top = 1 << 8 * width
    for value in (0, 1, 2, 127, 128, top // 2 - 1, top // 2, top // 2 + 1, top - 2, top - 1):
        data = value.to_bytes(width, "little")
        found: list[OutboxEvent | UnreadRow] = []
        decode_rows(b"\1\1\0" + data, 0, 3 + width, layout, found)
        assert found[0].id == int.from_bytes(data, "little", signed=signed)


# --- layouts --------------------------------------------------------------------------------------

_TYPES = [8, 15, 15, 15, 15, 252, 252, 18]
_SHAPE = shape(_TYPES, (256).to_bytes(2, "little") * 4 + b"\2\2\6")


def test_a_shape_that_fits_is_named_and_not_proved() -> None:
    layout = build(parse_table_map(_SHAPE, mariadb=False), COLUMNS, FIELDS, {})
    assert layout.named
    assert not layout.proved
    assert layout.slots == list(range(8))


def test_a_shape_that_does_not_fit_is_only_walked_over() -> None:
    for types, metas in (
        ([*_TYPES, 3], (256).to_bytes(2, "little") * 4 + b"\2\2\6"),
        (_TYPES, (255).to_bytes(2, "little") * 4 + b"\2\2\6"),
        (_TYPES[:-1], (256).to_bytes(2, "little") * 4 + b"\2\2"),
    ):
        layout = build(parse_table_map(shape(types, metas), mariadb=False), COLUMNS, FIELDS, {})
        # One column more than the schema has may be hidden at an end.
        assert layout.named == (len(types) > 8)
        if not layout.named:
            assert set(layout.slots) == {rows.SKIP}


def test_other_names_for_the_columns() -> None:
    names = {**FIELDS, "event_id": "Event", "payload": "body"}
    renamed = {"event_id": "event", "payload": "BODY"}
    schema = [
        SchemaColumn(renamed.get(item.name, item.name), *[
            getattr(item, field) for field in SchemaColumn.__slots__[1:]
        ])
        for item in COLUMNS
    ]  # fmt: skip
    mapped = parse_table_map(_SHAPE, mariadb=False)
    assert build(mapped, schema, names, {}).named
    assert not build(mapped, schema, FIELDS, {}).named


def test_a_table_without_headers() -> None:
    schema = [item for item in COLUMNS if item.name != "headers"]
    mapped = parse_table_map(_SHAPE, mariadb=False)
    layout = build(mapped[:5] + mapped[6:], schema, FIELDS, {})
    assert layout.named
    assert layout.slots == [0, 1, 2, 3, 4, 5, 7]


# --- proof ----------------------------------------------------------------------------------------


class Table:
    """Rows by their id, as SELECT would give them."""

    def __init__(self, *stored: OutboxEvent) -> None:
        self.rows = {row.id: row for row in stored}
        self.asked = 0

    def find(self, row_id: int) -> OutboxEvent | None:
        self.asked += 1
        return self.rows.get(row_id)


class Impatient(LayoutResolver):
    """Does not wait for rows that are not there."""

    def _tries(self) -> Iterator[None]:
        yield


def resolver(table: Table, schema: Sequence[SchemaColumn] = COLUMNS) -> LayoutResolver:
    return Impatient(lambda: schema, dict, table.find, FIELDS, mariadb=False)


def event(row_id: int, key: str, **changes: object) -> OutboxEvent:
    values = OutboxEvent(row_id, f"e{row_id}", "order", key, "MADE", b"{}", None, None)
    return values._replace(**changes)  # type: ignore[arg-type]


def body(*written: tuple[int, str]) -> bytes:
    return b"\x08\xff" + images(written)


def test_a_row_that_select_gives_equal_proves_the_names() -> None:
    made = resolver(Table(event(2, "b")))
    layout = made.resolve(_SHAPE)
    data = body((1, "a"), (2, "b"))
    # The first is gone by now, the second is there.
    assert made.doubtful(layout, data, 0, len(data)) == [event(1, "a"), event(2, "b")]
    assert layout.proved


def test_rows_that_are_gone_prove_nothing() -> None:
    made = resolver(Table())
    layout = made.resolve(_SHAPE)
    data = body((1, "a"))
    assert made.doubtful(layout, data, 0, len(data)) == [event(1, "a")]
    assert layout.named
    assert not layout.proved


def test_a_row_that_has_the_id_of_another_proves_nothing() -> None:
    made = resolver(Table(event(1, "z", event_id="later")))
    layout = made.resolve(_SHAPE)
    data = body((1, "a"))
    assert made.doubtful(layout, data, 0, len(data)) == [event(1, "a")]
    assert layout.named
    assert not layout.proved


def test_a_row_that_was_changed_since_is_read_back() -> None:
    made = resolver(Table(event(1, "a", payload=b"[1]"), event(3, "c", headers=b"{}")))
    layout = made.resolve(_SHAPE)
    data = body((1, "a"), (2, "b"), (3, "c"))
    reason = "the row was changed since"
    assert made.doubtful(layout, data, 0, len(data)) == [
        UnreadRow(1, reason), event(2, "b"), UnreadRow(3, reason),
    ]  # fmt: skip
    assert not layout.proved


def test_names_that_are_wrong_leave_the_rows_to_their_keys() -> None:
    """Two columns of one type have changed places since: the row says so."""
    swapped = [*COLUMNS[:2], COLUMNS[3], COLUMNS[2], *COLUMNS[4:]]
    table = Table(event(1, "a"), event(2, "b"))
    made = resolver(table, swapped)
    layout = made.resolve(_SHAPE)
    data = body((1, "a"), (2, "b"), (3, "gone"))
    reason = "the log does not name the columns of this row"
    assert made.doubtful(layout, data, 0, len(data)) == [UnreadRow(1, reason), UnreadRow(2, reason)]
    assert not layout.named
    assert made.lost == 1


def test_rows_of_an_unnamed_shape_are_found_by_key_and_event_id() -> None:
    """A number that happens to be another row's key is not enough."""
    table = Table(event(7, "a", event_id="e7"), event(1, "x", event_id="another"))
    made = resolver(table)
    # As if there had been one more number in front.
    longer = shape([3, *_TYPES, 3], (256).to_bytes(2, "little") * 4 + b"\2\2\6")
    layout = made.resolve(longer)
    assert not layout.named
    [image] = [images([(7, "a")])]
    nulls = int.from_bytes(image[:1], "little") << 1
    data = b"\x0a\xff\x03" + nulls.to_bytes(2, "little") + b"\1\0\0\0" + image[1:] + b"\1\0\0\0"
    found = made.doubtful(layout, data, 0, len(data))
    assert [row.id for row in found] == [7]


@pytest.mark.parametrize("age", [120, 0])
def test_what_was_committed_long_ago_is_not_waited_for(age: int) -> None:
    """It is visible, or gone. What was committed now may be visible in a moment."""
    table = Table(event(7, "another"))
    made = LayoutResolver(lambda: COLUMNS, dict, table.find, FIELDS, mariadb=False)
    made._patience = 0.05
    layout = made.resolve(_SHAPE)
    asked: list[int] = []
    find = made._find
    made._find = lambda row_id: asked.append(row_id) or find(row_id)
    data = body((1, "a"))
    committed = int((time.time() - age) * 1e6)
    assert made.doubtful(layout, data, 0, len(data), committed) == [event(1, "a")]
    assert not layout.proved
    once = 2  # by the column that is the key, and as one of the row's numbers
    assert asked.count(1) == once if age else asked.count(1) > once


def test_a_layout_whose_rows_are_read_back_anyway_is_proved_by_their_keys() -> None:
    schema = [*COLUMNS[:3], column("aggregate_id", "varchar", octets=256, charset="eucjpms"),
              *COLUMNS[4:]]  # fmt: skip
    table = Table(event(1, "a"))
    made = resolver(table, schema)
    layout = made.resolve(_SHAPE)
    data = body((1, "a"))
    for _ in range(2):
        found = made.doubtful(layout, data, 0, len(data))
        assert found == [UnreadRow(1, "aggregate_id: character set eucjpms")]
    assert layout.proved


def test_raw_images() -> None:
    widths = [8, -2, -2, -2, -2, -2, -2, 8]
    data = body((1, "a"), (2, "b"))
    found = list(row_images(data, 0, len(data), widths))
    assert [image[0] for image in found] == [n.to_bytes(8, "little") for n in (1, 2)]
    assert [image[3] for image in found] == [b"a", b"b"]
    assert found[0][6:] == [None, None]
    few = b"\x08\x05" + images([(1, "a")], present=0b101)
    [image] = list(row_images(few, 0, len(few), widths))
    assert image == [(1).to_bytes(8, "little"), None, b"order", *[None] * 5]
    with pytest.raises(ValueError, match="columns where the table map has"):
        list(row_images(data, 0, len(data), widths[1:]))
    with pytest.raises((ValueError, IndexError)):
        list(row_images(data[:-3], 0, len(data) - 3, widths))


# --- images that lack columns ---------------------------------------------------------------------


def test_every_subset_of_columns_walks_right() -> None:
    layout = build(parse_table_map(_SHAPE, mariadb=False), COLUMNS, FIELDS, {})
    for kept in itertools.product((0, 1), repeat=7):
        present = 1 | sum(bit << place for place, bit in enumerate(kept, 1))
        data = bytes([8, present]) + images([(1, "a"), (2, "b")], present)
        found: list[OutboxEvent | UnreadRow] = []
        decode_rows(data, 0, len(data), layout, found)
        assert [row.id for row in found] == [1, 2]
        assert all(isinstance(row, UnreadRow) == (present != 0xFF) for row in found)
    assert len(layout._subsets) == 127


def test_many_columns_have_a_long_count() -> None:
    count = 300
    layout = Layout(
        [Column(8, slot=0, kind=rows.INTEGER), *[Column(1)] * (count - 1)], named=True, proved=True
    )
    bitmap = b"\xff" * 37 + b"\x0f"
    data = b"\xfc" + count.to_bytes(2, "little") + bitmap + bytes(38)
    data += (9).to_bytes(8, "little") + b"x" * (count - 1)
    found: list[OutboxEvent | UnreadRow] = []
    decode_rows(data, 0, len(data), layout, found)
    assert [row.id for row in found] == [9]
    for cut in (b"\xfb", b"\xfd\0\0"):
        with pytest.raises(ValueError, match="column count"):
            decode_rows(cut + data[3:], 0, len(data), layout, found)
