"""The counter of bytes and launches, on small HLO programs whose traffic is known by hand."""

import pytest
from gpu import count
from gpu.hlo import Shape


def entry(*lines, computations=""):
    body = "\n".join("  " + line for line in lines)
    return f"HloModule m, is_scheduled=true\n\n{computations}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def counted(text, rules=None):
    result = count.report(text, rules)
    return result.nbytes, result.kernels


def test_a_kernel_reads_its_operands_and_writes_its_result():
    text = entry("%p = f32[8,128]{1,0} parameter(0)", "ROOT %n = f32[8,128]{1,0} negate(%p)")
    assert counted(text) == (2 * 8 * 128 * 4, 1)


def test_views_and_constants_are_free():
    text = entry(
        "%p = bf16[8,128]{1,0} parameter(0)",
        "%c = f32[] constant(0)",
        "%b = bf16[1024]{0} bitcast(%p)",
        "%t = (bf16[1024]{0}, /*index=1*/f32[]) tuple(%b, %c)",
        "ROOT %g = bf16[1024]{0} get-tuple-element(%t), index=0",
    )
    assert counted(text) == (0, 0)


def test_a_loop_counts_its_body_times_its_trips():
    body = """%body (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  ROOT %n = f32[100]{0} negate(%a)
}
%cond (a: f32[100]) -> pred[] {
  %a.1 = f32[100]{0} parameter(0)
  ROOT %k = pred[] constant(true)
}"""
    loop = 'ROOT %w = f32[100]{0} while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    text = entry("%p = f32[100]{0} parameter(0)", loop, computations=body)
    assert counted(text) == (7 * 800, 7)
    with pytest.raises(ValueError, match="no known trip count"):
        counted(text.replace("known_trip_count", "other"))


def test_a_conditional_counts_its_dearest_branch_and_lists_all():
    branches = """%one (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  ROOT %n = f32[100]{0} negate(%a)
}
%two (b: f32[100]) -> f32[100] {
  ROOT %b = f32[100]{0} parameter(0)
}"""
    line = "ROOT %c = f32[100]{0} conditional(%i, %p, %p), branch_computations={%one, %two}"
    text = entry("%p = f32[100]{0} parameter(0)", "%i = s32[] parameter(1)", line, computations=branches)
    result = count.report(text)
    assert (result.nbytes, result.kernels, result.branches) == (800, 1, [(800, 0)])


FUSED = "%f (a: {0}, i: s32[]) -> {1} {{\n  %a = {0} parameter(0)\n  %i = s32[] parameter(1)\n{2}\n}}"


def fusion(source, result, *lines):
    inner = FUSED.format(source, result, "\n".join("  " + line for line in lines))
    call = f"ROOT %r = {result} fusion(%p, %j), kind=kLoop, calls=%f"
    return entry(f"%p = {source} parameter(0)", "%j = s32[] parameter(1)", call, computations=inner)


def test_a_fusion_that_slices_reads_the_slice():
    text = fusion(
        "f32[7,64,1000]", "f32[64,1000]",
        "%d = f32[1,64,1000]{2,1,0} dynamic-slice(%a, %i, %i, %i), dynamic_slice_sizes={1,64,1000}",
        "ROOT %b = f32[64,1000]{1,0} bitcast(%d)",
    )  # fmt: skip
    slab = 64 * 1000 * 4
    assert counted(text) == (2 * slab + 3 * 4 - 8, 1)  # the index is one operand of four bytes


def test_a_slice_behind_elementwise_work_still_reads_the_slice():
    text = fusion(
        "bf16[7,640]", "f32[640]",
        "%c = f32[7,640]{1,0} convert(%a)",
        "%s = f32[1,640]{1,0} slice(%c), slice={[3:4], [0:640]}",
        "ROOT %b = f32[640]{0} bitcast(%s)",
    )  # fmt: skip
    assert counted(text) == (640 * 2 + 640 * 4, 1)


def test_an_in_place_update_counts_the_update():
    text = fusion(
        "bf16[7,640]", "bf16[7,640]",
        "%z = bf16[1,640]{1,0} constant({...})",
        "ROOT %u = bf16[7,640]{1,0} dynamic-update-slice(%a, %z, %i, %i)",
    )  # fmt: skip
    assert counted(text) == (640 * 2 + 4, 1)


def test_gathered_rows_count_sectors():
    """Three rows of two floats: 8 bytes each, but 32 bytes are what memory delivers."""
    line = "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,2}"
    text = entry(
        "%p = f32[1000,2]{1,0} parameter(0)",
        "%i = s32[3,1]{1,0} parameter(1)",
        f"ROOT %g = f32[3,2]{{1,0}} gather(%p, %i), {line}",
    )
    assert counted(text) == (3 * 32 + 3 * 4 + 3 * 8, 1)


def test_a_strided_slice_reads_every_sector_it_touches():
    text = entry(
        "%p = bf16[4,1600]{1,0} parameter(0)",
        "ROOT %s = bf16[4,100]{1,0} slice(%p), slice={[0:4], [0:1600:16]}",
    )
    assert counted(text) == (4 * 1600 * 2 + 4 * 100 * 2, 1)  # one value in each 32-byte sector: all of it


def test_a_scatter_writes_sectors_and_never_more_than_its_array():
    attributes = "update_window_dims={}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1"
    lines = ["%p = f32[{n}]{{0}} parameter(0)", "%i = s32[5,1]{{1,0}} parameter(1)", "%u = f32[5]{{0}} parameter(2)"]
    last = f"ROOT %s = f32[{{n}}]{{{{0}}}} scatter(%p, %i, %u), {attributes.replace('{', '{{').replace('}', '}}')}"
    for n, written in ((1000, 5 * 32), (10, 40)):
        text = entry(*(line.format(n=n) for line in [*lines, last]))
        assert counted(text) == (written + 20 + 20, 1)


def test_a_library_call_counts_results_without_scratch():
    text = entry(
        "%p = bf16[64,256]{1,0} parameter(0)",
        "%w = bf16[1000,256]{1,0} parameter(1)",
        'ROOT %g = (f32[64,1000]{1,0}, s8[4194304]{0}) custom-call(%p, %w), custom_call_target="__cublas$gemm"',
    )
    assert counted(text) == (64 * 512 + 1000 * 512 + 64 * 4000, 1)


def test_pallas_kernels_are_found_by_name_and_need_a_rule():
    call = (
        'ROOT %k = (f32[64]{0}) custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", '
        'backend_config={debug = false, grid_x = 3 : i32, ir = "ML\\EF\\00name = x", name = "mine", num_warps = 4}'
    )
    text = entry("%p = f32[640]{0} parameter(0)", call)
    with pytest.raises(ValueError, match="no byte rule for the Pallas kernel 'mine'"):
        counted(text)
    seen = []
    assert counted(text, {"mine": lambda c: seen.append(c) or 123}) == (123, 1)
    assert seen[0].operands == (Shape("f32", (640,)),)
    assert seen[0].results == (Shape("f32", (64,)),)


def test_sorts_are_listed_by_length():
    text = entry(
        "%p = f32[4,151936]{1,0} parameter(0)",
        "%s = f32[4,151936]{1,0} sort(%p), dimensions={1}, to_apply=%less",
        'ROOT %r = f32[4,99]{1,0} custom-call(%s), custom_call_target="__cub$DeviceRadixSort"',
    )
    assert count.report(text).sorts == [151936, 99]


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        count.report("HloModule m\n")
