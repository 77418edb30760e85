"""The style sheet of the report page: light and dark, from a phone to a wide screen, without scripts."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --dim: #64707d; --line: #d9dee3; --page: #fff; --box: #f6f7f9;
  --good: #047857; --bad: #b91c1c; --missed: #fef2f2; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde3ea; --dim: #98a4b1; --line: #39424d; --page: #14181d;
  --box: #1e242b; --good: #34d399; --bad: #f87171; --missed: #2c1a1d; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1080px;
  margin: 0 auto; padding: 32px 24px 64px; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; } h2 { font-size: 18px; margin: 36px 0 10px; }
.dim { color: var(--dim); margin: 2px 0 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(136px, 1fr)); gap: 12px; margin-top: 22px; }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; color: var(--dim); font-size: 14px; }
.figure b { display: block; color: var(--ink); font-size: 20px; font-variant-numeric: tabular-nums; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 12px 20px; }
.curves img { width: 100%; max-width: 560px; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: min(100%, 480px); }
th { text-align: left; color: var(--dim); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 24px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: normal; }
td { font-variant-numeric: tabular-nums; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 16px;
  margin-top: 14px; }
.card { display: flex; flex-wrap: wrap; gap: 4px 16px; border: 1px solid var(--line); border-left-width: 4px;
  border-radius: 8px; padding: 12px 14px; }
.card.right { border-left-color: var(--good); } .card.wrong { border-left-color: var(--bad);
  background: var(--missed); }
.card dl { flex: 1 1 150px; margin: 0; } .card dt { color: var(--dim); font-size: 13px; margin-top: 6px; }
.card dd { margin: 0; white-space: pre-wrap; max-height: 18em; overflow-y: auto; }
.mark { font-weight: 600; } .right .mark { color: var(--good); } .wrong .mark { color: var(--bad); }
.media { flex: 1 1 100%; display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 120px), 1fr));
  gap: 8px; }
.media:has(> .zoom:only-child) { flex: 0 1 240px; }
.media audio { width: 100%; max-width: 340px; }
.zoom { display: block; min-height: 240px; }
.zoom input { position: absolute; opacity: 0; }
.zoom img { display: block; width: 100%; max-width: 240px; height: 240px; object-fit: contain; cursor: zoom-in;
  border: 1px solid var(--line); border-radius: 4px; background: var(--box); }
.zoom img.small { image-rendering: pixelated; }
.zoom input:focus-visible + img { outline: 2px solid #2563eb; }
.zoom input:checked + img { position: fixed; inset: 0; z-index: 1; width: 100vw; max-width: none; height: 100vh;
  border: 0; border-radius: 0; background: rgba(0, 0, 0, 0.88); cursor: zoom-out; }
.rollouts { flex: 1 1 100%; } .rollouts td { padding: 4px 14px 4px 0; }
.rollouts .text { width: 100%; white-space: pre-wrap; overflow-wrap: anywhere; }
.reward { font-weight: 600; white-space: nowrap; } .good { color: var(--good); } .bad { color: var(--bad); }
code { user-select: all; font-size: 13px; }
pre, .command { display: block; background: var(--box); border-radius: 8px; padding: 10px 14px; margin: 4px 0 12px;
  font-size: 13px; }
pre { overflow-x: auto; }
summary { cursor: pointer; color: var(--dim); }
@media (max-width: 480px) { body { padding: 20px 16px 48px; } h1 { font-size: 22px; }
  .figures { grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); } .figure { padding: 8px 10px; }
  .figure b { font-size: 18px; } th, td { padding-right: 14px; font-size: 14px; } }
"""
