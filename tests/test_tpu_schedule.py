"""Reading the listing of bundles that the TPU's compiler writes."""

from pallas_kernels.tpu_schedule import Loop, Schedule, parse_loops

LISTING = """\
LB: loop body
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = smov 0 }
   0x2   : > { %s3 = smov 0 }
   0x3 LB: >> { %s4 = sphi }
   0x4 PF: >> { %s5 = smov 0 }
   0x5 LB: >> { %s6 = sphi }
   0x6 LB: >>> { %s7 = sphi }
   0x7   : >> { %s8 = smov 0 }
   0x8   : > { %s9 = smov 0 }
   0x9   :  {}
"""


def test_loops_are_counted_without_the_loops_within():
    assert parse_loops(LISTING) == (Loop(3, (Loop(2, ()), Loop(2, (Loop(1, ()),)))),)


def test_a_fetch_is_its_loops_as_often_as_they_run():
    schedule = Schedule(vmem_bytes=0, fetch=1000, start=100, wait=10, tile=1)
    assert schedule.cycles(groups=2, blocks=8, tiles=3) == 1000 + 200 + 80 + 3
