"""Reading the schedules that libtpu writes."""

from benchmarks.schedules import Kernel, Loop, loops_of

SCHEDULE = """\
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sphi %s1 }
   0x2   : > { %s3 = sadd.s32 1, %s2  ;;  %p0 = scmp.ne.s32.totalorder %s3, 4 }
base_bounds: (32, 1)
   0x3 LB: >> { %v1 = vld [vmem:[%s3] sm:$0xff] }
   0x4   :  {}
   0x5 PF: >> { %v2 = vmul.f32 2.0, %v1 }
   0x6   : > { %7 = sbr.rel (!%p0) }
   0x7 LB: > { %s4 = sphi %s1 }
   0x8   :  { %9 = vsyncpa [#allocation3], 1 }
"""


def test_loops_are_those_that_the_marks_say():
    assert loops_of(SCHEDULE) == (Loop(0, 2), Loop(1, 3), Loop(2, 3), Loop(1, 1))


def test_bundles_that_run():
    kernel = Kernel(name="k", loops=loops_of(SCHEDULE), vmem=0)
    assert kernel.bundles == 9
    assert kernel.cycles((10, 100)) == 2 + 10 * (3 + 1) + 100 * 3
    assert kernel.cycles((10,)) == 2 + 10 * (3 + 1 + 3)  # loops deeper than those known count as the one around them
