"""How the statistics' page looks, light and dark: one sheet, which stands in the page."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #16191d; --soft: #59616b; --line: #e3e6ea;
  --c1: #2a6fdb; --c2: #e8862e; --c3: #17998a; --c4: #8a4fd0; --c5: #d94a63; --c6: #c3a012; --c7: #5aa545;
  --co: #9aa3ad; }
@media (prefers-color-scheme: dark) {
  :root { --page: #101317; --card: #191d23; --ink: #e8ebef; --soft: #9aa4af; --line: #2b313a;
    --c1: #5b97f2; --c2: #f0a05a; --c3: #3fc0b0; --c4: #ae82ea; --c5: #ef7288; --c6: #dcbd3f; --c7: #82c76e;
    --co: #737d88; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 34px 24px 60px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 38px 0 12px; }
h3 { font-size: 15.5px; margin: 0 0 2px; }
p { margin: 0 0 12px; }
.soft, .note { color: var(--soft); }
.note { font-size: 13.5px; margin: 0 0 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px 11px; }
.tile b { display: block; font-size: 25px; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; }
.tile span { color: var(--soft); font-size: 13px; }
.card { padding: 16px 18px 14px; margin: 0 0 14px; min-width: 0; overflow-x: auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 14px; }
.pair .card { margin: 0; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 16px; margin: 4px 0 8px; font-size: 13px; color: var(--soft); }
.legend i, td i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .unit { font-size: 12px; } svg .label { fill: var(--ink); } svg .marked { fill: var(--ink);
  font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 5px; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .mark { stroke: var(--ink); stroke-dasharray: 3 3; }
svg .hover { fill: transparent; } svg .hover:hover { fill: var(--ink); fill-opacity: 0.07; }
.c1 { fill: var(--c1); background: var(--c1); } .c2 { fill: var(--c2); background: var(--c2); }
.c3 { fill: var(--c3); background: var(--c3); } .c4 { fill: var(--c4); background: var(--c4); }
.c5 { fill: var(--c5); background: var(--c5); } .c6 { fill: var(--c6); background: var(--c6); }
.c7 { fill: var(--c7); background: var(--c7); } .co { fill: var(--co); background: var(--co); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); padding: 4px 10px 7px;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th.text, td.text { text-align: left; }
td.text { max-width: 250px; overflow: hidden; text-overflow: ellipsis; unicode-bidi: isolate; }
td.spark { width: 190px; padding: 2px 10px; }
dl { margin: 0; font-size: 14px; } dt { font-weight: 600; margin-top: 10px; } dd { margin: 0; color: var(--soft); }
@media (max-width: 620px) { main { padding: 20px 12px; } .pair { grid-template-columns: 1fr; }
  .card svg { min-width: 460px; } .card svg.wide { min-width: 800px; } .card td svg { min-width: 0; }
  td.spark { width: 120px; min-width: 120px; } td.text { max-width: 150px; } }
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""
