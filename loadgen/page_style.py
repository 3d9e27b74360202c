"""The style sheet of report.html: light and dark, phone and paper, colours that colour-blind readers can tell apart."""

# Okabe & Ito (2008), lightened for dark backgrounds.
STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --soft: #5b6470; --line: #d5dae0; --panel: #f6f8fa;
  --bad: #b42318; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0568a; --c4: #b8860b; --c5: #2f9ad0;
  --c6: #6b4fbb; --c7: #555; --wait: #c9ced6; --queue: #e2b04a; --prefill: #d55e00; --tokens: #9cc7e6;
  --stroke: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e9ed; --soft: #9aa4b0; --line: #343b44;
  --panel: #1c2127; --bad: #ff8a7a; --c0: #4db5ee; --c1: #ff9352; --c2: #2fd0a0; --c3: #e59ac4; --c4: #f0c145;
  --c5: #8ecdf2; --c6: #a994ff; --c7: #bbb; --wait: #4a525d; --queue: #b98a2c; --prefill: #ff9352; --tokens: #24506c;
  --stroke: #4db5ee; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.4em; margin: .3em 0 .6em; overflow-wrap: anywhere; }
h2 { font-size: 1.1em; margin: 1.8em 0 .5em; border-bottom: 1px solid var(--line); padding-bottom: .2em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3em .8em; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; }
th { font-weight: 500; } th:first-child, .text td, .text th { text-align: left; }
.unit, .note, .ratio { color: var(--soft); font-size: .87em; font-weight: 400; } .note { margin: .4em 0; }
.box { border-left: 4px solid var(--queue); background: var(--panel); padding: .5em .9em; margin: .5em 0; }
.box.bad { border-color: var(--bad); } .box ul { margin: .3em 0; padding-left: 1.2em; }
.legend { margin: .4em 0; display: flex; flex-wrap: wrap; gap: .2em 1.2em; font-size: .92em; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .45em; border-radius: 2px;
  background: var(--c); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 12px; }
svg { width: 100%; height: auto; display: block; background: var(--panel); border-radius: 6px; }
svg.timeline { min-width: 640px; margin: .5em 0; }
text { fill: var(--fg); font: 12px system-ui, sans-serif; } .title { font-weight: 600; font-size: 13px; }
.tick, .label { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); stroke-width: .6; fill: none; } .axis { stroke: var(--soft); fill: none; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; } .dot { fill: var(--c); }
.c1.line { stroke-dasharray: 7 3; } .c2.line { stroke-dasharray: 2 3; } .c3.line { stroke-dasharray: 9 3 2 3; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.wait { --c: var(--wait); } .queue { --c: var(--queue); } .prefill { --c: var(--prefill); }
.tokens { --c: var(--tokens); } .failed { --c: var(--bad); } rect { fill: var(--c); }
.stroke { stroke: var(--stroke); stroke-width: .8; fill: none; }
pre { overflow-x: auto; background: var(--panel); padding: .8em; border-radius: 6px; font-size: 12.5px; }
summary { cursor: pointer; padding: .3em 0; }
@media print { :root { --bg: #fff; --fg: #000; --panel: #fff; } main { max-width: none; padding: 0; }
  body { font-size: 11px; }
  section, svg, table { break-inside: avoid; } svg { border: 1px solid var(--line); }
  .charts { grid-template-columns: 1fr 1fr; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
