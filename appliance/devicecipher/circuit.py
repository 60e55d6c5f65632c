"""The S-box of AES as a boolean circuit.

An inversion in the field of 256 elements, built as a tower of quadratic extensions down to bits: the inverse of a pair
of elements of the smaller field is the swapped pair divided by its norm (D. Canright, "A very compact S-box for AES",
CHES 2005). The sums that products by Karatsuba need are shared with the change of basis (J. Boyar and R. Peralta, "A
new combinational logic minimization technique with applications to cryptology", SEA 2010). The normal bases are
{fe, ff} over the field of 16, {5c, 5d} over the field of 4 and {bc, bd} over bits; the linear layers were made shorter
by computing the most frequent pair of terms first, over and over. 36 ANDs and 92 XORs; a test runs all 256 inputs.

The function is written for values that know ``&`` and ``^`` and holds no constant, so it serves integers, wires of a
trace, tensors of torch and of Triton alike. Triton compiles its source: keep it plain.
"""

from __future__ import annotations

import typing
from typing import Final

# What the circuit leaves out of the affine map; the key schedule adds it to the round keys instead.
AFFINE: Final = 0x63


def sbox(
    x0: typing.Any,
    x1: typing.Any,
    x2: typing.Any,
    x3: typing.Any,
    x4: typing.Any,
    x5: typing.Any,
    x6: typing.Any,
    x7: typing.Any,
) -> typing.Any:
    """Give the eight bit planes of ``S(x) XOR 0x63``, from those of ``x``, lowest bit first."""
    # Into the tower: the coordinates of both halves, their sums, and the part of the norm that is linear.
    t1 = x1 ^ x3
    t2 = x5 ^ x6
    t3 = x4 ^ x7
    t4 = x2 ^ t1
    t5 = x0 ^ t2
    t6 = t1 ^ t3
    t7 = x6 ^ t4
    t8 = x2 ^ x7
    t9 = x5 ^ t4
    t10 = x2 ^ t3
    t11 = x1 ^ t5
    t12 = t8 ^ t11
    t13 = x7 ^ t9
    t14 = x3 ^ t8
    t15 = x5 ^ t14
    t16 = x1 ^ t10
    t17 = x0 ^ t7
    t18 = x4 ^ t5
    t19 = x0 ^ t6
    t20 = x2 ^ x4
    t21 = x7 ^ t5
    t22 = x4 ^ t2
    t23 = x5 ^ t10
    t24 = t4 ^ t22
    t25 = x1 ^ x7
    t26 = t2 ^ t6
    t27 = t3 ^ t7
    # The product of the halves, by Karatsuba twice, and with it the norm d0..d3.
    t28 = t11 & t5
    t29 = t21 & t17
    t30 = t25 & t9
    t31 = t12 & t19
    t32 = t18 & x0
    t33 = t16 & t6
    t34 = t8 & t26
    t35 = t3 & t7
    t36 = t20 & t23
    t37 = t34 ^ t35
    t38 = t35 ^ t36
    t39 = t29 ^ t37
    t40 = t32 ^ t37
    t41 = t30 ^ t38
    t42 = t33 ^ t38
    t43 = t28 ^ t41
    t44 = t33 ^ t40
    t45 = t30 ^ t39
    t46 = t31 ^ t42
    d0 = t43 ^ t15
    d1 = t45 ^ t13
    d2 = t46 ^ t27
    d3 = t44 ^ t24
    # The norm's inverse in the field of 16, the same way: e0..e8 are its coordinates and their sums.
    t47 = d0 ^ d1
    t48 = d2 ^ d3
    t49 = d0 & d2
    t50 = d1 & d3
    t51 = t47 & t48
    t52 = t51 ^ d0
    t53 = t49 ^ t52
    t54 = t50 ^ t52
    t55 = d1 ^ t48
    t56 = t54 ^ t55
    t57 = d2 ^ t53
    t58 = t56 ^ t57
    t59 = t56 & d0
    t60 = t57 & d1
    t61 = t58 & t47
    t62 = t56 & d2
    t63 = t57 & d3
    t64 = t58 & t48
    t65 = t62 ^ t63
    t66 = t62 ^ t64
    t67 = t59 ^ t60
    t68 = t59 ^ t61
    t69 = t60 ^ t61
    t70 = t63 ^ t64
    t71 = t69 ^ t70
    t72 = t65 ^ t67
    t73 = t66 ^ t68
    # The inverse times both halves, without the sums that the last layer makes.
    t74 = t66 & t11
    t75 = t70 & t21
    t76 = t65 & t25
    t77 = t68 & t12
    t78 = t69 & t18
    t79 = t67 & t16
    t80 = t73 & t8
    t81 = t71 & t3
    t82 = t72 & t20
    t83 = t66 & t5
    t84 = t70 & t17
    t85 = t65 & t9
    t86 = t68 & t19
    t87 = t69 & x0
    t88 = t67 & t6
    t89 = t73 & t26
    t90 = t71 & t7
    t91 = t72 & t23
    # Out of the tower, and the affine map without its constant.
    t92 = t81 ^ t82
    t93 = t77 ^ t92
    t94 = t79 ^ t93
    t95 = t86 ^ t94
    t96 = t83 ^ t85
    t97 = t76 ^ t87
    t98 = t88 ^ t97
    t99 = t74 ^ t92
    t100 = t89 ^ t98
    t101 = t90 ^ t91
    t102 = t84 ^ t99
    t103 = t88 ^ t95
    t104 = t75 ^ t100
    t105 = t83 ^ t87
    t106 = t96 ^ t101
    t107 = t80 ^ t90
    t108 = t94 ^ t106
    t109 = t89 ^ t102
    t110 = t104 ^ t107
    t111 = t91 ^ t104
    t112 = t84 ^ t105
    t113 = t96 ^ t103
    t114 = t83 ^ t109
    t115 = t85 ^ t98
    t116 = t78 ^ t96
    t117 = t91 ^ t114
    t118 = t93 ^ t116
    t119 = t111 ^ t118
    t120 = t95 ^ t112
    t121 = t101 ^ t103
    t122 = t76 ^ t117
    t123 = t81 ^ t110
    t124 = t102 ^ t115
    return t124, t122, t119, t120, t113, t123, t121, t108
