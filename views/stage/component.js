// The stage as a Streamlit component: called once per change of data, with the same parent element as long as it is on the page.
const mounted = new WeakMap();

export default function component({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".stage-root");
  let stage = mounted.get(root);
  if (!stage) {
    stage = mountStage(root, {});
    makeRoomForChoosers(root);
    mounted.set(root, stage);
  }
  stage.hooks.need = (have) => setTriggerValue("need", { have, trace_id: data.trace_id });
  stage.update(data);
  return () => setTimeout(() => root.isConnected || stage.destroy());
}

// The page puts its choosers over the right end of the stage's head; how wide they are depends on the model's name.
function makeRoomForChoosers(root) {
  const choosers = document.querySelector(".st-key-choosers");
  const reserve = () => root.style.setProperty("--stage-reserve", `${choosers ? choosers.offsetWidth + 16 : 272}px`);
  reserve();
  if (choosers) new ResizeObserver(reserve).observe(choosers);
}
